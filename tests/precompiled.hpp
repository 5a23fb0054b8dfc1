// What nearly every test includes, parsed once for all of them (cmake/testing.cmake). A test still
// includes what it uses: it must compile without this file, -DCMAKE_DISABLE_PRECOMPILE_HEADERS=ON.
#pragma once

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <vector>
