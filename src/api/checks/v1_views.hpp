// The short names of what the checks turn v1's descriptors into (ops/copy_rows/views.hpp).
#pragma once

#include "ops/copy_rows/views.hpp"

namespace kvx::boundary {

using ops::copy_rows::CacheSide;
using ops::copy_rows::CacheView;
using ops::copy_rows::Element;
using ops::copy_rows::IndexArray;
using ops::copy_rows::IoSide;
using ops::copy_rows::IoView;
using ops::copy_rows::MemoryType;
using ops::copy_rows::RowShape;
using ops::copy_rows::ScaleView;
using ops::copy_rows::SlotView;
using ops::copy_rows::TableView;

}  // namespace kvx::boundary
