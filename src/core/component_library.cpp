// component_functions: a shared library, and one symbol. A component is never closed.
#include "core/component_library.hpp"

#include <string>

#include "core/os/os.hpp"

namespace kvx {

Result<const void*> component_functions(std::string_view name) {
  const std::string library = os::component_file(name);
  void* const opened = os::open_library(library);
  if (opened == nullptr) {
    return unsupported(
        "{} cannot be opened ({}); install it beside libkvx, or name its folder in {}: a build of "
        "components/{} makes it",
        library, os::library_problem(), os::library_path_variable(), name);
  }
  const std::string symbol = fmt::format("kvx_{}_functions", name);
  const auto call = reinterpret_cast<const void* (*)()>(os::symbol_of(opened, symbol));
  if (call != nullptr) return call();
  return unsupported("{} has no {}; expected that of the same build as libkvx", library, symbol);
}

}  // namespace kvx
