// Result<T> is a value or an Error; Status is success or an Error. Nothing in the core throws.
#pragma once

#include <fmt/format.h>

#include <string>
#include <utility>
#include <variant>

namespace kvx {

// The codes of the C ABI (kvx_status_t), less OK.
enum class ErrorCode {
  kInvalidArgument = 1,
  kUnsupported = 2,
  kOutOfRange = 3,
  kIncompatible = 4,
  kInternal = 5,
};

// A message names the field, its value and what was expected.
struct Error {
  ErrorCode code;
  std::string message;
};

template <class... Args>
Error invalid_argument(fmt::format_string<Args...> text, Args&&... args) {
  return {ErrorCode::kInvalidArgument, fmt::format(text, std::forward<Args>(args)...)};
}
template <class... Args>
Error unsupported(fmt::format_string<Args...> text, Args&&... args) {
  return {ErrorCode::kUnsupported, fmt::format(text, std::forward<Args>(args)...)};
}
template <class... Args>
Error out_of_range(fmt::format_string<Args...> text, Args&&... args) {
  return {ErrorCode::kOutOfRange, fmt::format(text, std::forward<Args>(args)...)};
}
template <class... Args>
Error internal_error(fmt::format_string<Args...> text, Args&&... args) {
  return {ErrorCode::kInternal, fmt::format(text, std::forward<Args>(args)...)};
}

template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : state_(std::in_place_index<0>, std::move(value)) {}      // NOLINT: implicit
  Result(Error error) : state_(std::in_place_index<1>, std::move(error)) {}  // NOLINT

  bool ok() const { return state_.index() == 0; }

  // Requires: ok().
  T& value() & { return *std::get_if<0>(&state_); }
  const T& value() const& { return *std::get_if<0>(&state_); }
  T&& value() && { return std::move(*std::get_if<0>(&state_)); }

  // Requires: !ok().
  const Error& error() const { return *std::get_if<1>(&state_); }

 private:
  std::variant<T, Error> state_;
};

template <>
class [[nodiscard]] Result<void> {
 public:
  Result() = default;
  Result(Error error) : error_(std::move(error)), ok_(false) {}  // NOLINT: implicit

  bool ok() const { return ok_; }
  // Requires: !ok().
  const Error& error() const { return error_; }

 private:
  Error error_{};
  bool ok_ = true;
};

using Status = Result<void>;

}  // namespace kvx

// Leaves the function with the error of `expression` (a Status or a Result).
#define KVX_RETURN_IF_ERROR(expression)                                                 \
  do {                                                                                  \
    if (auto kvx_status_ = (expression); !kvx_status_.ok()) return kvx_status_.error(); \
  } while (false)

#define KVX_CONCAT_INNER(a, b) a##b
#define KVX_CONCAT(a, b) KVX_CONCAT_INNER(a, b)
#define KVX_ASSIGN_OR_RETURN_IMPL(result, declaration, expression) \
  auto result = (expression);                                      \
  if (!result.ok()) return result.error();                         \
  declaration = std::move(result).value()

// Declares or assigns from a Result, or leaves the function with its error.
#define KVX_ASSIGN_OR_RETURN(declaration, expression) \
  KVX_ASSIGN_OR_RETURN_IMPL(KVX_CONCAT(kvx_result_, __LINE__), declaration, expression)
