// Any bytes are a GGUF file or an error. The tensors, sizes and tokenizer of an accepted file can
// be read.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <span>
#include <string>
#include <vector>

#include "runner/gguf.hpp"
#include "runner/model_config.hpp"
#include "runner/tokenizer.hpp"

namespace {

using kvx::runner::GgufTensor;
using kvx::runner::GgufView;
using kvx::runner::SpecialTokens;
using kvx::runner::Tokenizer;

constexpr int64_t kMostElements = 1 << 16;  // of a tensor, so that a run stays short
constexpr size_t kMostMessage = 1000;

void require(bool holds) {
  if (!holds) std::abort();
}

template <class Result>
void check_message(const Result& result) {
  if (result.ok()) return;
  require(!result.error().message.empty() && result.error().message.size() < kMostMessage);
}

void read_tensor(const GgufTensor& tensor) {
  require(tensor.num_rows() * tensor.row_bytes() == static_cast<int64_t>(tensor.data.size()));
  if (tensor.row_elements() > kMostElements) return;
  std::vector<float> row(static_cast<size_t>(tensor.row_elements()));
  const int64_t last = tensor.num_rows() - 1;
  kvx::runner::dequantize(tensor.type, tensor.row(last), tensor.row_elements(), row.data());
}

void use_tokenizer(const GgufView& gguf) {
  const auto tokenizer = Tokenizer::create(gguf);
  check_message(tokenizer);
  if (!tokenizer.ok()) return;
  const std::string text = "I'm 12 caf\xc3\xa9s <|im_end|>\n\xff";
  for (const auto special : {SpecialTokens::kParse, SpecialTokens::kAsText}) {
    const auto tokens = tokenizer.value().encode(text, special);
    check_message(tokens);
    if (tokens.ok()) (void)tokenizer.value().decode(tokens.value());
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto gguf = GgufView::parse(std::span(data, size));
  check_message(gguf);
  if (!gguf.ok()) return 0;
  for (const auto& [name, tensor] : gguf.value().tensors()) read_tensor(tensor);
  check_message(kvx::runner::read_model_config(gguf.value()));
  use_tokenizer(gguf.value());
  return 0;
}
