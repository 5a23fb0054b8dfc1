// Chat: turns of a user and a model on one cache, line by line.
#pragma once

#include <functional>

#include "tools/kvx/chat/history.hpp"
#include "tools/kvx/chat/interrupts.hpp"
#include "tools/kvx/session.hpp"

namespace kvx::tool {

// Begins a new sequence with what is cached of the prompt; returns the rest.
using BeginSequence = std::function<Result<std::span<const int>>(const std::vector<int>& prompt)>;

// Reads lines of stdin until it ends, or until ctrl-C comes twice at the prompt of a terminal, and
// answers them on stdout. A line such as /new is a command. A context that is full forgets the
// oldest turns. UNSUPPORTED: the model has no chat template.
Status run_chat(Session& session, const runner::GenerateOptions& options,
                const BeginSequence& begin);

}  // namespace kvx::tool
