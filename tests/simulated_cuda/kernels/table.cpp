// SPDX-License-Identifier: Apache-2.0
//
// Finds the emulated function of a kernel: by its readable name among this library's own symbols,
// and how to call it by its parameters. nvcc and gcc give local names different forms, so the
// mangled names are not the same.
#include "simulated_cuda/kernels/table.h"

#include <cxxabi.h>
#include <dlfcn.h>
#include <elf.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>

namespace simulated_cuda {
namespace {

std::string readable(const char* mangled) {
  int status = 0;
  char* const text = abi::__cxa_demangle(mangled, nullptr, nullptr, &status);
  std::string result = status == 0 ? text : mangled;
  std::free(text);
  return result;
}

/// "(a, b)" of "void f<int>(a, b)" and of "void (*)(a, b)".
std::string parameters(const std::string& name) {
  int depth = 0;
  for (std::size_t i = name.size(); i-- > 0;) {
    if (name[i] == ')' || name[i] == '>') ++depth;
    if (name[i] == '(' || name[i] == '<') --depth;
    if (name[i] == '(' && depth == 0) return name.substr(i);
  }
  return {};
}

std::map<std::string, MakeGrid>& signatures() {
  static auto* const all = new std::map<std::string, MakeGrid>();
  return *all;
}

using Functions = std::map<std::string, void*>;

void add_functions(Functions& all, const char* file, char* loaded_at) {
  const auto* const header = reinterpret_cast<const Elf64_Ehdr*>(file);
  const auto* const sections = reinterpret_cast<const Elf64_Shdr*>(file + header->e_shoff);
  for (unsigned i = 0; i < header->e_shnum; ++i) {
    if (sections[i].sh_type != SHT_SYMTAB) continue;
    const auto* const symbols = reinterpret_cast<const Elf64_Sym*>(file + sections[i].sh_offset);
    const char* const names = file + sections[sections[i].sh_link].sh_offset;
    for (std::size_t j = 0; j < sections[i].sh_size / sizeof(Elf64_Sym); ++j) {
      const char* const name = names + symbols[j].st_name;
      if (ELF64_ST_TYPE(symbols[j].st_info) == STT_FUNC && symbols[j].st_value != 0 &&
          std::strstr(name, "fastamp") != nullptr) {
        all[readable(name)] = loaded_at + symbols[j].st_value;
      }
    }
  }
}

/// The functions of this library, hidden ones too.
Functions read_functions() {
  Functions all;
  Dl_info self{};
  dladdr(reinterpret_cast<const void*>(&read_functions), &self);
  const int file = open(self.dli_fname, O_RDONLY | O_CLOEXEC);
  struct stat facts{};
  if (file < 0 || fstat(file, &facts) != 0) {
    std::perror(self.dli_fname);
    std::abort();
  }
  const auto bytes = static_cast<std::size_t>(facts.st_size);
  void* const data = mmap(nullptr, bytes, PROT_READ, MAP_PRIVATE, file, 0);
  close(file);
  add_functions(all, static_cast<const char*>(data), static_cast<char*>(self.dli_fbase));
  munmap(data, bytes);
  return all;
}

}  // namespace

bool add_signature(const char* type, MakeGrid make) {
  signatures()[parameters(readable(type))] = make;
  return true;
}

void keep(void* kernel) {
  static void* volatile kept = nullptr;
  kept = kernel;
}

}  // namespace simulated_cuda

extern "C" [[gnu::visibility("default")]] simulated_cuda::Kernel simulated_cuda_find_kernel(
    const char* mangled) {
  using namespace simulated_cuda;
  static const auto* const functions = new Functions(read_functions());
  const std::string name = readable(mangled);
  const auto function = functions->find(name);
  const auto signature = signatures().find(parameters(name));
  if (function == functions->end() || signature == signatures().end()) {
    std::fprintf(stderr, "simulated CUDA: no %s for the kernel %s\n",
                 function == functions->end() ? "function" : "signature", name.c_str());
    return {};
  }
  return {function->second, signature->second};
}
