// A core Error as a C++ exception, which module.cpp turns into a Python one.
#pragma once

#include <exception>
#include <string>
#include <utility>

#include "core/result.hpp"

namespace kvx::python {

class CoreError : public std::exception {
 public:
  explicit CoreError(Error error) : error_(std::move(error)) {}
  const char* what() const noexcept override { return error_.message.c_str(); }
  ErrorCode code() const { return error_.code; }
  const std::string& message() const { return error_.message; }

 private:
  Error error_;
};

inline void throw_if_error(const Status& status) {
  if (!status.ok()) throw CoreError(status.error());
}

template <class T>
T value_of(Result<T> result) {
  if (!result.ok()) throw CoreError(result.error());
  return std::move(result).value();
}

}  // namespace kvx::python
