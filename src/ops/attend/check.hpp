// What attend's arguments must hold, checked once at its head.
#pragma once

#include "ops/attend/attend.hpp"

namespace kvx::ops {

Status check_attend(const AttendArgs& args);

}  // namespace kvx::ops
