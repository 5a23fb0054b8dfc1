// This process's environment, by the calls of POSIX or of Windows.
#pragma once

#include <cstdlib>
#include <string>

namespace kvx::tests {

// An empty value: Windows has no such variables and takes the name away.
inline void set_variable(const char* name, const std::string& value) {
#ifdef _WIN32
  _putenv_s(name, value.c_str());
#else
  setenv(name, value.c_str(), 1);
#endif
}

inline void unset_variable(const char* name) {
#ifdef _WIN32
  _putenv_s(name, "");
#else
  unsetenv(name);
#endif
}

}  // namespace kvx::tests
