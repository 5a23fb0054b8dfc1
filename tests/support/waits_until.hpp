// waits_until: for what another thread or process brings about, however slow the machine is.
#pragma once

#include <chrono>
#include <thread>

namespace kvx::tests {

// Whether holds() became true; false after a minute.
template <class Holds>
bool waits_until(const Holds& holds) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::minutes(1);
  while (!holds()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

}  // namespace kvx::tests
