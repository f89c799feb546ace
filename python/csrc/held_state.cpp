// SPDX-License-Identifier: Apache-2.0
#include "held_state.h"

#include "bindings.h"

#include <pybind11/critical_section.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pythoncapi_compat.h>

#include <cstdint>
#include <tuple>
#include <utility>
#include <vector>

namespace fastamp::python {
namespace {

/// A name that torch looks something up by, and what it finds there meanwhile.
class SwappedName {
 public:
  /// @param owner  A module or class, or the name of a module that may not be loaded.
  /// @param names  The first of these that the owner has.
  /// @param make   Makes what stands there from what is found there. Called again only after
  /// something else was found, as blocks of policies are frequent, and short.
  SwappedName(pybind11::object owner, std::vector<pybind11::str> names, pybind11::object make)
      : owner_(std::move(owner)), names_(std::move(names)), make_(std::move(make)) {}

  /// Does nothing if it is swapped, or if the owner is not loaded or has none of the names.
  void swap() {
    const auto owner = owner_now();
    if (swapped_in_ || !owner) {
      return;
    }
    for (const auto& name : names_) {
      const auto found = found_in(owner, name);
      if (!found) {
        continue;
      }
      if (!found.is(found_)) {
        // A class shows what a staticmethod holds.
        const pybind11::object as_written = owner.attr("__dict__")[name];
        wrapper_ = make_(as_written);
        before_ = as_written;
        found_ = found;
      }
      pybind11::setattr(owner, name, wrapper_);
      swapped_in_ = owner;
      name_ = name;
      return;
    }
  }

  void restore() noexcept {
    const auto owner = std::exchange(swapped_in_, {});
    if (owner && PyObject_SetAttr(owner.ptr(), name_.ptr(), before_.ptr()) != 0) {
      PyErr_WriteUnraisable(owner.ptr());
    }
  }

 private:
  /// Null if the owner does not have the name. An AttributeError would take a microsecond.
  static pybind11::object found_in(const pybind11::object& owner, const pybind11::str& name) {
    if (PyModule_Check(owner.ptr()) != 0) {
      PyObject* found = nullptr;
      PyDict_GetItemRef(PyModule_GetDict(owner.ptr()), name.ptr(), &found);
      return pybind11::reinterpret_steal<pybind11::object>(found);
    }
    return owner.attr(name);
  }

  pybind11::object owner_now() const {
    if (!pybind11::isinstance<pybind11::str>(owner_)) {
      return owner_;
    }
    const auto loaded =
        pybind11::reinterpret_steal<pybind11::object>(PyImport_GetModule(owner_.ptr()));
    PyErr_Clear();
    return loaded;
  }

  pybind11::object owner_;
  std::vector<pybind11::str> names_;
  pybind11::object make_;
  pybind11::object found_;   ///< What wrapper_ was made for,
  pybind11::object before_;  ///< and as the owner's dictionary has it.
  pybind11::object wrapper_;
  pybind11::object swapped_in_;  ///< The owner, while wrapper_ stands there,
  pybind11::object name_;        ///< and the name.
};

using SwappedNames = std::vector<SwappedName>;

/// Names that are swapped while some thread has state, and those while compiled functions have to
/// run eagerly. Guarded by the GIL, or by `lock` in a Python without one, which is let go of when
/// the GIL would be. Held for good: threads may outlive the interpreter.
struct State {
  const pybind11::handle lock = Py_Ellipsis;  ///< Any object that is there; nobody else locks it.
  std::int64_t policies = 0;
  std::int64_t recipes = 0;
  bool recipes_are_guarded = true;
  SwappedNames while_held;
  SwappedNames while_eager;
  pybind11::object compiled_code;  ///< Returns what runs compiled code now; null without dynamo.

  bool is_held() const { return policies + recipes != 0; }
  bool is_eager() const { return policies != 0 || (recipes != 0 && !recipes_are_guarded); }
  std::int64_t& count(StateKind kind) { return kind == StateKind::kPolicies ? policies : recipes; }
};

State& state() {
  static auto* const made = new State;
  return *made;
}

void restore_all(SwappedNames& names) noexcept {
  for (auto& name : names) {
    name.restore();
  }
}

void follow(SwappedNames& names, bool wanted) {
  if (!wanted) {
    restore_all(names);
    return;
  }
  try {
    for (auto& name : names) {
      name.swap();
    }
  } catch (...) {
    restore_all(names);
    throw;
  }
}

void begin_eager() {
  if (const auto& compiled_code = state().compiled_code) {
    const auto running = compiled_code();
    if (!running.is_none() && !running.is(pybind11::bool_(false))) {
      PyErr_SetString(PyExc_RuntimeError,
                      "fastamp: expected op policies to begin outside of compiled code, got a "
                      "function that torch.compile runs");
      throw pybind11::error_already_set();
    }
  }
  follow(state().while_eager, true);
}

using Name = std::tuple<pybind11::object, std::vector<pybind11::str>, pybind11::object>;

SwappedNames swapped_names(const std::vector<Name>& names) {
  SwappedNames made;
  for (const auto& [owner, spellings, make] : names) {
    made.emplace_back(owner, spellings, make);
  }
  return made;
}

void set_names(const std::vector<Name>& while_held) {
  const pybind11::scoped_critical_section locked(state().lock);
  state().while_held = swapped_names(while_held);
  follow(state().while_held, true);  // Makes what is to stand there.
  follow(state().while_held, false);
}

void set_names_of_dynamo(const std::vector<Name>& while_eager,
                         const pybind11::object& compiled_code) {
  const pybind11::scoped_critical_section locked(state().lock);
  state().while_eager = swapped_names(while_eager);
  follow(state().while_eager, state().is_eager());
  state().compiled_code = compiled_code;
}

void set_recipes_guarded(bool guarded) {
  const pybind11::scoped_critical_section locked(state().lock);
  state().recipes_are_guarded = guarded;
  follow(state().while_eager, state().is_eager());
}

}  // namespace

void hold_state(StateKind kind) {
  const pybind11::scoped_critical_section locked(state().lock);
  auto& count = state().count(kind);
  const bool was_held = state().is_held();
  const bool was_eager = state().is_eager();
  ++count;
  try {
    if (!was_eager && state().is_eager()) {
      begin_eager();
    }
    if (!was_held) {
      follow(state().while_held, true);
    }
  } catch (...) {
    let_go_of_state(kind);
    throw;
  }
}

void let_go_of_state(StateKind kind) noexcept {
  const pybind11::scoped_critical_section locked(state().lock);
  --state().count(kind);
  if (!state().is_eager()) {
    restore_all(state().while_eager);
  }
  if (!state().is_held()) {
    restore_all(state().while_held);
  }
}

void bind_held_state(pybind11::module_& module) {
  const auto kind = [](bool policies) {
    return policies ? StateKind::kPolicies : StateKind::kRecipe;
  };
  module.def("hold_state", [kind](bool policies) { hold_state(kind(policies)); });
  module.def("let_go_of_state", [kind](bool policies) { let_go_of_state(kind(policies)); });
  module.def("set_recipes_guarded", set_recipes_guarded);
  module.def("set_names_while_held", set_names);
  module.def("set_names_while_eager", set_names_of_dynamo);
}

}  // namespace fastamp::python
