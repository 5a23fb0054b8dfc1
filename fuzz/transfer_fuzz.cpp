// Messages of a transfer from a hostile peer: they are read or refused, and what is read can be
// written again.
#include <cstdlib>

#include "transfer/messages.hpp"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace kvx::transfer;
  const std::span<const uint8_t> bytes(data, size);
  if (const auto request = parse_request(bytes); request.ok()) {
    const auto again = parse_request(encode(request.value()));
    if (!again.ok() || again.value().offset != request.value().offset ||
        again.value().text != request.value().text) {
      std::abort();
    }
  }
  if (const auto answer = parse_answer(bytes); answer.ok()) {
    std::vector<uint8_t> written = encode(answer.value());
    written.insert(written.end(), answer.value().data.begin(), answer.value().data.end());
    const auto again = parse_answer(written);
    if (!again.ok() || again.value().path != answer.value().path ||
        again.value().data.size() != answer.value().data.size()) {
      std::abort();
    }
  }
  return 0;
}
