// A layer that a v1 cache descriptor describes.
#pragma once

#include <string>

#include "api/checks/layer_view.hpp"

namespace kvx::boundary {

// Reads layer.cache and its scales. Errors as read_layer(). Requires: layer.cache is not null.
Status read_cache_layer(const kvx_layer_t& layer, const std::string& name, LayerOfCaller& result);

// Checks given scales per tensor or per head, which are few enough to be read in every call.
// name: the scales' field. INVALID_ARGUMENT: one is not positive and finite. Requires: the host
// reads them.
Status check_given_scales(const ops::SideView& side, int num_heads, const std::string& name);

}  // namespace kvx::boundary
