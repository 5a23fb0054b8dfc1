// Special tokens are cut out first, the rest goes through the pre-tokeniser, and each piece's bytes
// are merged in the order that the model learned.
#include "runner/tokenizer.hpp"

#include <algorithm>
#include <queue>

#include "runner/byte_alphabet.hpp"

namespace kvx::runner {
namespace {

// tokenizer.ggml.token_type
enum TokenType : int64_t { kNormal = 1, kUnknown = 2, kControl = 3, kUserDefined = 4, kByte = 6 };

constexpr int64_t kMostTokens = int64_t{1} << 24;

uint64_t pair_key(int left, int right) {
  return static_cast<uint64_t>(left) << 32 | static_cast<uint32_t>(right);
}

Result<std::optional<int>> token_id(const GgufView& gguf, std::string_view key, int size) {
  if (gguf.find(key) == nullptr) return std::optional<int>();
  KVX_ASSIGN_OR_RETURN(const int64_t id, gguf.integer(key, 0, size - 1));
  return std::optional<int>(static_cast<int>(id));
}

}  // namespace

Result<Tokenizer> Tokenizer::create(const GgufView& gguf) {
  KVX_ASSIGN_OR_RETURN(const std::string_view model, gguf.string("tokenizer.ggml.model"));
  if (model != "gpt2") {
    return unsupported("tokenizer.ggml.model is {}; gpt2 (byte-level BPE) is known",
                       model.substr(0, 40));
  }
  KVX_ASSIGN_OR_RETURN(const std::string_view pre, gguf.string_or("tokenizer.ggml.pre", "default"));
  KVX_ASSIGN_OR_RETURN(UnicodeSplit split, UnicodeSplit::create(pre));
  Tokenizer tokenizer(std::move(split));
  KVX_RETURN_IF_ERROR(tokenizer.read_tokens(gguf));
  if (pre == "llama-bpe") tokenizer.keep_whole_words();
  KVX_RETURN_IF_ERROR(tokenizer.read_merges(gguf));
  KVX_RETURN_IF_ERROR(tokenizer.read_ids(gguf));
  return tokenizer;
}

Status Tokenizer::read_tokens(const GgufView& gguf) {
  KVX_ASSIGN_OR_RETURN(const auto tokens, gguf.strings("tokenizer.ggml.tokens"));
  const auto size = static_cast<int64_t>(tokens.size());
  if (size < 1 || size > kMostTokens) {
    return invalid_argument("tokenizer.ggml.tokens has {} tokens; 1 to {} are allowed", size,
                            kMostTokens);
  }
  std::vector<int64_t> types(tokens.size(), kNormal);
  if (gguf.find("tokenizer.ggml.token_type") != nullptr) {
    KVX_ASSIGN_OR_RETURN(types, gguf.integers("tokenizer.ggml.token_type"));
  }
  if (types.size() != tokens.size()) {
    return invalid_argument("tokenizer.ggml.token_type has {} entries; {} were expected",
                            types.size(), tokens.size());
  }
  token_of_byte_.assign(256, -1);
  for (size_t i = 0; i < tokens.size(); ++i) {
    const bool special = types[i] == kControl || types[i] == kUserDefined || types[i] == kUnknown;
    const std::optional<std::string> bytes =
        special ? std::nullopt : characters_to_bytes(tokens[i]);
    bytes_.push_back(bytes.value_or(std::string(tokens[i])));
    is_special_.push_back(special);
    const int id = static_cast<int>(i);
    if (special && !tokens[i].empty()) {
      special_.push_back({std::string(tokens[i]), id, types[i] == kUserDefined});
    }
    if (bytes && bytes->size() == 1) token_of_byte_[static_cast<uint8_t>((*bytes)[0])] = id;
  }
  std::stable_sort(special_.begin(), special_.end(),
                   [](const auto& a, const auto& b) { return a.text < b.text; });
  return {};
}

// Llama 3's vocabulary has words that no order of its merges makes; a word that is a token is taken
// as it is.
void Tokenizer::keep_whole_words() {
  for (int token = 0; token < size(); ++token) {
    if (!is_special(token)) whole_words_.emplace(bytes_[token], token);
  }
}

Status Tokenizer::read_merges(const GgufView& gguf) {
  KVX_ASSIGN_OR_RETURN(const auto tokens, gguf.strings("tokenizer.ggml.tokens"));
  KVX_ASSIGN_OR_RETURN(const auto merges, gguf.strings("tokenizer.ggml.merges"));
  std::unordered_map<std::string_view, int> ids;
  for (size_t i = 0; i < tokens.size(); ++i) ids.emplace(tokens[i], static_cast<int>(i));
  for (size_t rank = 0; rank < merges.size(); ++rank) {
    const std::string_view text = merges[rank];
    const size_t space = text.find(' ');
    if (space == std::string_view::npos || space == 0 || space + 1 == text.size()) {
      return invalid_argument("tokenizer.ggml.merges[{}] is \"{}\"; two tokens were expected", rank,
                              text.substr(0, 80));
    }
    const auto left = ids.find(text.substr(0, space));
    const auto right = ids.find(text.substr(space + 1));
    const std::string joined =
        std::string(text.substr(0, space)) + std::string(text.substr(space + 1));
    const auto whole = ids.find(joined);
    if (left == ids.end() || right == ids.end() || whole == ids.end()) {
      return invalid_argument(
          "tokenizer.ggml.merges[{}] is \"{}\"; its halves and {} must be tokens", rank,
          text.substr(0, 80), joined.substr(0, 80));
    }
    merges_.try_emplace(pair_key(left->second, right->second),
                        Merge{static_cast<int>(rank), whole->second});
  }
  return {};
}

Status Tokenizer::read_ids(const GgufView& gguf) {
  KVX_ASSIGN_OR_RETURN(unknown_, token_id(gguf, "tokenizer.ggml.unknown_token_id", size()));
  KVX_ASSIGN_OR_RETURN(bos_, token_id(gguf, "tokenizer.ggml.bos_token_id", size()));
  KVX_ASSIGN_OR_RETURN(eos_, token_id(gguf, "tokenizer.ggml.eos_token_id", size()));
  KVX_ASSIGN_OR_RETURN(eot_, token_id(gguf, "tokenizer.ggml.eot_token_id", size()));
  KVX_ASSIGN_OR_RETURN(adds_bos_, gguf.flag_or("tokenizer.ggml.add_bos_token", false));
  return {};
}

Result<std::vector<int>> Tokenizer::encode(std::string_view text, SpecialTokens special) const {
  std::vector<int> out;
  size_t text_begin = 0;
  for (size_t i = 0; i < text.size();) {
    const Special* found = special_at(text.substr(i), special);
    if (found == nullptr) {
      ++i;
      continue;
    }
    KVX_RETURN_IF_ERROR(encode_text(text.substr(text_begin, i - text_begin), out));
    out.push_back(found->token);
    i += found->text.size();
    text_begin = i;
  }
  KVX_RETURN_IF_ERROR(encode_text(text.substr(text_begin), out));
  return out;
}

// The longest special token that text starts with. Each byte narrows the range of those that agree
// so far; one that ends there is the first of the range.
const Tokenizer::Special* Tokenizer::special_at(std::string_view text,
                                                SpecialTokens special) const {
  const Special* longest = nullptr;
  auto first = special_.begin();
  auto last = special_.end();
  for (size_t i = 0; i < text.size(); ++i) {
    const int next = static_cast<uint8_t>(text[i]);
    const auto byte_of = [i](const Special& s) {
      return i < s.text.size() ? static_cast<uint8_t>(s.text[i]) : -1;
    };
    first = std::partition_point(first, last, [&](const Special& s) { return byte_of(s) < next; });
    last = std::partition_point(first, last, [&](const Special& s) { return byte_of(s) == next; });
    if (first == last) break;
    const bool counts = special == SpecialTokens::kParse || first->is_word;
    if (first->text.size() == i + 1 && counts) longest = &*first;
  }
  return longest;
}

Status Tokenizer::encode_text(std::string_view text, std::vector<int>& out) const {
  KVX_ASSIGN_OR_RETURN(const std::vector<std::string_view> pieces, split_.split(text));
  std::vector<int> tokens;
  for (const std::string_view piece : pieces) {
    if (!whole_words_.empty()) {
      const auto whole = whole_words_.find(std::string(piece));
      if (whole != whole_words_.end()) {
        out.push_back(whole->second);
        continue;
      }
    }
    tokens.clear();
    KVX_RETURN_IF_ERROR(bytes_to_tokens(piece, tokens));
    merge(tokens);
    out.insert(out.end(), tokens.begin(), tokens.end());
  }
  return {};
}

Status Tokenizer::bytes_to_tokens(std::string_view piece, std::vector<int>& out) const {
  for (const char c : piece) {
    const auto byte = static_cast<uint8_t>(c);
    const int token = token_of_byte_[byte] >= 0 ? token_of_byte_[byte] : unknown_.value_or(-1);
    if (token < 0) {
      return invalid_argument(
          "the text has byte 0x{:02X}; the model has no token for it and no unknown token", byte);
    }
    out.push_back(token);
  }
  return {};
}

const Tokenizer::Merge* Tokenizer::find_merge(int left, int right) const {
  const auto found = merges_.find(pair_key(left, right));
  return found == merges_.end() ? nullptr : &found->second;
}

// The best-ranked pair first, the leftmost of equals. A heap of candidates over a linked list: a
// long piece costs n log n, not n^2.
void Tokenizer::merge(std::vector<int>& tokens) const {
  struct Candidate {
    int rank;
    int left;  // index of the left token
    int left_token, right_token;
    bool operator>(const Candidate& other) const {
      return rank != other.rank ? rank > other.rank : left > other.left;
    }
  };
  const int count = static_cast<int>(tokens.size());
  std::vector<int> next(tokens.size()), previous(tokens.size());
  for (int i = 0; i < count; ++i) {
    next[i] = i + 1;
    previous[i] = i - 1;
  }
  std::priority_queue<Candidate, std::vector<Candidate>, std::greater<>> candidates;
  const auto consider = [&](int left) {
    if (left < 0 || next[left] >= count) return;
    const int right_token = tokens[next[left]];
    if (const Merge* pair = find_merge(tokens[left], right_token)) {
      candidates.push({pair->rank, left, tokens[left], right_token});
    }
  };
  for (int i = 0; i < count; ++i) consider(i);

  constexpr int kGone = -1;
  while (!candidates.empty()) {
    const Candidate best = candidates.top();
    candidates.pop();
    const int right = next[best.left];
    // A neighbour's merge may have changed either token since.
    if (right >= count || tokens[best.left] != best.left_token ||
        tokens[right] != best.right_token) {
      continue;
    }
    tokens[best.left] = find_merge(best.left_token, best.right_token)->token;
    tokens[right] = kGone;
    next[best.left] = next[right];
    if (next[right] < count) previous[next[right]] = best.left;
    consider(previous[best.left]);
    consider(best.left);
  }
  std::erase(tokens, kGone);
}

std::string Tokenizer::decode(const std::vector<int>& tokens) const {
  std::string text;
  for (const int token : tokens) text += decode(token);
  return text;
}

bool Tokenizer::ends_generation(int token) const {
  return token == eos_ || token == eot_ || token == find_special("<|im_end|>") ||
         token == find_special("<|endoftext|>");
}

std::optional<int> Tokenizer::find_special(std::string_view name) const {
  for (const Special& special : special_) {
    if (special.text == name) return special.token;
  }
  return std::nullopt;
}

size_t complete_utf8_length(std::string_view text) {
  // A character has at most four bytes; only a lead byte says how many.
  for (size_t back = 1; back <= std::min<size_t>(3, text.size()); ++back) {
    const auto byte = static_cast<uint8_t>(text[text.size() - back]);
    if ((byte & 0xC0) == 0x80) continue;
    const size_t length = byte >= 0xF0 ? 4 : byte >= 0xE0 ? 3 : byte >= 0xC0 ? 2 : 1;
    return length > back ? text.size() - back : text.size();
  }
  return text.size();
}

}  // namespace kvx::runner
