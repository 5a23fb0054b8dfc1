// The values of a "deepseek2" GGUF: latent attention, experts, and YaRN's rotary frequencies.
#pragma once

#include "runner/config_keys.hpp"
#include "runner/model_config.hpp"

namespace kvx::runner {

// Requires: the sizes that all architectures have are read. Errors as read_model_config.
Status read_latent_config(const ConfigKeys& keys, ModelConfig& config);

}  // namespace kvx::runner
