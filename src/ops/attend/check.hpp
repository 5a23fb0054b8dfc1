// What attend's arguments must hold, checked once at its head.
#pragma once

#include "ops/attend/attend.hpp"

namespace kvx::ops {

// What needs no look at lengths, tables and rows, which may lie on a GPU or come later.
Status check_attend_shape(const AttendArgs& args);

Status check_attend(const AttendArgs& args);

}  // namespace kvx::ops
