#include <fastamp/scaler/grad_scaler.h>

#include <ATen/core/ivalue.h>
#include <c10/util/Exception.h>
#include <torch/serialize/input-archive.h>
#include <torch/serialize/output-archive.h>

#include <string>

namespace fastamp {
namespace {

// Entries carry torch's state_dict keys, so a reader of the archive meets familiar names.
constexpr const char* kEnabled = "enabled";

template <typename T>
void write_if(torch::serialize::OutputArchive& archive, const std::string& key,
              const std::optional<T>& value) {
  if (value) {
    archive.write(key, c10::IValue(*value));
  }
}

c10::IValue read(torch::serialize::InputArchive& archive, const std::string& key) {
  c10::IValue value;
  TORCH_CHECK(archive.try_read(key, value),
              "GradScaler::load: expected the archive of a GradScaler, "
              "got one without an entry \"",
              key, "\"");
  return value;
}

std::optional<double> read_double_if(torch::serialize::InputArchive& archive,
                                     const std::string& key) {
  c10::IValue value;
  return archive.try_read(key, value) ? std::optional<double>(value.toDouble()) : std::nullopt;
}

std::optional<int64_t> read_int_if(torch::serialize::InputArchive& archive,
                                   const std::string& key) {
  c10::IValue value;
  return archive.try_read(key, value) ? std::optional<int64_t>(value.toInt()) : std::nullopt;
}

}  // namespace

void GradScaler::save(torch::serialize::OutputArchive& archive) const {
  const auto current = state();
  archive.write(kEnabled, c10::IValue(current.has_value()));
  if (!current) {
    return;
  }
  archive.write("scale", c10::IValue(current->scale));
  archive.write("growth_factor", c10::IValue(current->growth_factor));
  archive.write("backoff_factor", c10::IValue(current->backoff_factor));
  archive.write("growth_interval", c10::IValue(current->growth_interval));
  archive.write("_growth_tracker", c10::IValue(current->growth_tracker));
  write_if(archive, "min_scale", current->min_scale);
  write_if(archive, "max_scale", current->max_scale);
  write_if(archive, "hysteresis", current->hysteresis);
  write_if(archive, "_hysteresis_tracker", current->hysteresis_tracker);
}

void GradScaler::load(torch::serialize::InputArchive& archive) {
  if (!is_enabled()) {
    return;
  }
  if (!read(archive, kEnabled).toBool()) {
    load_state(std::nullopt);
    return;
  }
  GradScalerState stored;
  stored.scale = read(archive, "scale").toDouble();
  stored.growth_factor = read(archive, "growth_factor").toDouble();
  stored.backoff_factor = read(archive, "backoff_factor").toDouble();
  stored.growth_interval = read(archive, "growth_interval").toInt();
  stored.growth_tracker = read(archive, "_growth_tracker").toInt();
  stored.min_scale = read_double_if(archive, "min_scale");
  stored.max_scale = read_double_if(archive, "max_scale");
  stored.hysteresis = read_int_if(archive, "hysteresis");
  stored.hysteresis_tracker = read_int_if(archive, "_hysteresis_tracker");
  load_state(stored);
}

torch::serialize::OutputArchive& operator<<(torch::serialize::OutputArchive& archive,
                                            const GradScaler& scaler) {
  scaler.save(archive);
  return archive;
}

torch::serialize::InputArchive& operator>>(torch::serialize::InputArchive& archive,
                                           GradScaler& scaler) {
  scaler.load(archive);
  return archive;
}

}  // namespace fastamp
