// As every component (core/component_library.hpp).
#include "transfer/open_component.hpp"

#include "core/component_library.hpp"

namespace kvx::transfer {

Result<const kvx_transfer_functions_t*> open_component() {
  static const Result<const kvx_transfer_functions_t*> opened =
      open_component_library<kvx_transfer_functions_t>("transfer", KVX_TRANSFER_VERSION);
  return opened;
}

}  // namespace kvx::transfer
