// kvx_append with what may happen to the rows first.
#pragma once

#include "api/checks/layer_view.hpp"
#include "api/verbs/device_verb.hpp"
#include "ops/append/append.hpp"

namespace kvx::boundary {

// What changes a call's rows in place between its checks and its write.
class RowProcessing {
 public:
  virtual ~RowProcessing() = default;
  // Checks the processing's own arguments for this call. Nothing has changed yet.
  virtual Status read(const ops::AppendArgs& append, const LayerOfCaller& layer) = 0;
  // On the host. An error has changed nothing.
  virtual Status run() = 0;
  // On a GPU: its arrays, and then the launch.
  virtual void add_arrays(VerbAddresses& addresses) const = 0;
  virtual Status launch(const DeviceVerb& verb) = 0;
};

// kvx_append. processing: null for none.
Status append(const kvx_append_args_t* caller, void* stream, RowProcessing* processing = nullptr);

}  // namespace kvx::boundary
