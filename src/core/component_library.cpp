// component_functions: dlopen, and one symbol. A component is never closed.
#include "core/component_library.hpp"

#include <dlfcn.h>

#include <string>

namespace kvx {

Result<const void*> component_functions(std::string_view name) {
  const std::string library = fmt::format("libkvx_{}.so.1", name);
  void* const opened = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (opened == nullptr) {
    return unsupported(
        "{} cannot be opened ({}); install it beside libkvx, or name its folder in "
        "LD_LIBRARY_PATH: a build of components/{} makes it",
        library, dlerror(), name);
  }
  const std::string symbol = fmt::format("kvx_{}_functions", name);
  const auto call = reinterpret_cast<const void* (*)()>(dlsym(opened, symbol.c_str()));
  if (call != nullptr) return call();
  return unsupported("{} has no {}; expected that of the same build as libkvx", library, symbol);
}

}  // namespace kvx
