// The pre-tokenisers' regular expressions, run by ICU one after the other: each cuts the pieces of
// the one before into its matches and what lies between them.
#include "runner/unicode_split.hpp"

#include <unicode/regex.h>
#include <unicode/unistr.h>
#include <unicode/utf8.h>

#include <span>
#include <utility>

namespace kvx::runner {
namespace {

// \s is spelled out: ICU's own \s leaves out U+000B and U+0085, which the models' tokenisers (Rust
// and Python) count as white space.
#define KVX_SPACE "\\p{White_Space}"

constexpr const char* kGpt2 = "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^" KVX_SPACE
                              "\\p{L}\\p{N}]+"
                              "|" KVX_SPACE "+(?!\\P{White_Space})|" KVX_SPACE "+";

// Llama 3 and Qwen 2 differ in how many digits stay together.
#define KVX_CL100K(digits)                                                                        \
  "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|" digits " ?[^" KVX_SPACE           \
  "\\p{L}\\p{N}]+[\\r\\n]*|" KVX_SPACE "*[\\r\\n]+|" KVX_SPACE "+(?!\\P{White_Space})|" KVX_SPACE \
  "+"

constexpr const char* kGpt2Alone[] = {kGpt2};
constexpr const char* kSmollm[] = {"\\p{N}", kGpt2};
constexpr const char* kLlamaBpe[] = {KVX_CL100K("\\p{N}{1,3}|")};
constexpr const char* kQwen2[] = {KVX_CL100K("\\p{N}|")};
constexpr const char* kDefault[] = {"[\\p{P}\\$\\+<=>\\^~\\|]+", kGpt2, "\\p{N}+",
                                    "[0-9][0-9][0-9]"};

#undef KVX_CL100K
#undef KVX_SPACE

struct PreTokeniser {
  std::string_view name;
  std::span<const char* const> patterns;
};

constexpr PreTokeniser kPreTokenisers[] = {{"smollm", kSmollm},
                                           {"llama-bpe", kLlamaBpe},
                                           {"qwen2", kQwen2},
                                           {"gpt-2", kGpt2Alone},
                                           {"default", kDefault}};

// A text as ICU's expressions read it, and where in the text it came from.
struct Utf16Text {
  icu::UnicodeString units;
  std::vector<int32_t> begins;  // [units.length() + 1]: the byte where a unit's character begins
};

Utf16Text utf16_of(std::string_view text) {
  const auto* bytes = reinterpret_cast<const uint8_t*>(text.data());
  const auto size = static_cast<int32_t>(text.size());
  Utf16Text out;
  for (int32_t next = 0; next < size;) {
    const int32_t begin = next;
    UChar32 character = 0;
    U8_NEXT_OR_FFFD(bytes, next, size, character);
    out.units.append(character);
    out.begins.resize(static_cast<size_t>(out.units.length()), begin);
  }
  out.begins.push_back(size);
  return out;
}

// Half-open ranges of UTF-16 units.
struct Range {
  int32_t begin;
  int32_t end;
};

Status split_range(icu::RegexMatcher& matcher, Range range, std::vector<Range>& out) {
  UErrorCode status = U_ZERO_ERROR;
  matcher.region(range.begin, range.end, status);
  int32_t done = range.begin;
  while (matcher.find(status) && U_SUCCESS(status)) {
    const Range match{matcher.start(status), matcher.end(status)};
    if (match.begin > done) out.push_back({done, match.begin});
    if (match.end > match.begin) out.push_back(match);
    done = match.end;
  }
  if (U_FAILURE(status)) {
    return internal_error("splitting the text failed at character {}: {}", done,
                          u_errorName(status));
  }
  if (done < range.end) out.push_back({done, range.end});
  return {};
}

}  // namespace

struct UnicodeSplit::Patterns {
  std::vector<std::unique_ptr<icu::RegexPattern>> compiled;
};

UnicodeSplit::UnicodeSplit(std::unique_ptr<Patterns> patterns) : patterns_(std::move(patterns)) {}
UnicodeSplit::UnicodeSplit(UnicodeSplit&&) noexcept = default;
UnicodeSplit& UnicodeSplit::operator=(UnicodeSplit&&) noexcept = default;
UnicodeSplit::~UnicodeSplit() = default;

Result<UnicodeSplit> UnicodeSplit::create(std::string_view name) {
  for (const PreTokeniser& candidate : kPreTokenisers) {
    if (candidate.name != name) continue;
    auto patterns = std::make_unique<Patterns>();
    for (const char* text : candidate.patterns) {
      UErrorCode status = U_ZERO_ERROR;
      UParseError where;
      patterns->compiled.emplace_back(
          icu::RegexPattern::compile(icu::UnicodeString::fromUTF8(text), where, status));
      if (U_FAILURE(status)) {
        return internal_error("ICU refuses the pattern {}: {}", text, u_errorName(status));
      }
    }
    return UnicodeSplit(std::move(patterns));
  }
  return unsupported(
      "tokenizer.ggml.pre is {}; smollm, llama-bpe, qwen2, gpt-2 and default are known",
      name.substr(0, 40));
}

Result<std::vector<std::string_view>> UnicodeSplit::split(std::string_view text) const {
  constexpr size_t kMostBytes = size_t{1} << 30;  // ICU counts UTF-16 units in 32 bits
  if (text.size() > kMostBytes) {
    return invalid_argument("the text has {} bytes; up to {} can be split", text.size(),
                            kMostBytes);
  }
  const Utf16Text utf16 = utf16_of(text);
  std::vector<Range> ranges{{0, utf16.units.length()}};
  for (const auto& pattern : patterns_->compiled) {
    UErrorCode status = U_ZERO_ERROR;
    const std::unique_ptr<icu::RegexMatcher> matcher(pattern->matcher(utf16.units, status));
    if (U_FAILURE(status)) return internal_error("ICU: {}", u_errorName(status));
    // A piece is matched as if it stood alone.
    matcher->useAnchoringBounds(true);
    matcher->useTransparentBounds(false);
    std::vector<Range> finer;
    for (const Range range : ranges) {
      KVX_RETURN_IF_ERROR(split_range(*matcher, range, finer));
    }
    ranges = std::move(finer);
  }
  std::vector<std::string_view> pieces;
  pieces.reserve(ranges.size());
  for (const Range range : ranges) {
    if (range.begin == range.end) continue;
    const auto begin = static_cast<size_t>(utf16.begins[range.begin]);
    const auto end = static_cast<size_t>(utf16.begins[range.end]);
    pieces.push_back(text.substr(begin, end - begin));
  }
  return pieces;
}

}  // namespace kvx::runner
