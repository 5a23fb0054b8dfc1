// CudaLane: the stream that a cache's work goes to on a GPU, and its order with the streams of the
// arrays' libraries. A verb is as work of one stream, the caller's: what that stream was given
// before is done before the verb, what it is given later sees the verb's output.
//
//   caller's stream   ... inputs ──┐ ready        done ┌── reads out ...
//   cache's stream                 └──► verb ──────────┘             (the same one: nothing to do)
//
// A lane without a stream of its own puts verbs on the caller's: nothing has to be ordered then,
// and a graph that the caller captures holds the verb alone.
#pragma once

#include <initializer_list>
#include <memory>
#include <string>
#include <vector>

#include "device/cuda_async.hpp"
#include "kv/verbs/cuda_place.hpp"
#include "python/src/arrays.hpp"

namespace kvx::python {

// Arrays that must stay as they are until the device has read them, since their libraries order
// nothing behind a stream.
using KeptArrays = std::vector<nb::ndarray<nb::ro>>;

class CudaLane {
 public:
  // device: cuda or cuda:N. stream: what stream_of() takes, or None for the device's default
  // stream; it lives as long as this. Throws CoreError: another word, no such device, no CUDA.
  CudaLane(const std::string& device, nb::handle stream);
  // Without a stream of its own. owner: what messages call whose device it is.
  static std::unique_ptr<CudaLane> of_callers(const std::string& device, const char* owner);

  kv::CudaPlacement placement(int max_step_tokens) const;
  int device() const { return device_.index; }
  // What a verb runs with.
  ops::CudaContext context(const ArrayPlace& place) const { return {device_, work_stream(place)}; }

  // Where a verb's arrays must lie, and the caller's stream: the one that is given, else the
  // current one of the first array whose library names one, else the cache's own. None may be among
  // the arrays.
  ArrayPlace place_of(nb::handle stream, std::initializer_list<nb::handle> arrays) const;
  // Adds an array whose library names no stream.
  void keep(KeptArrays& kept, const ArrayPlace& place, nb::handle object,
            const nb::ndarray<nb::ro>& array) const;

  // Around a verb, by one thread at a time, without the GIL. Arrays that end() is given are kept
  // until a later begin() with some has waited for the verb; those of before come back.
  Status begin(const ArrayPlace& place, const KeptArrays& kept);
  Status end(const ArrayPlace& place, KeptArrays& kept);

 private:
  CudaLane(const device::CudaDevice& device, nb::handle stream);
  // What `work` is given from now on runs behind what `stream` was given.
  Status put_behind(device::CudaStream stream, device::CudaStream work);
  device::CudaStream work_stream(const ArrayPlace& place) const {
    return is_on_callers_ ? place.stream : stream_;
  }

  device::CudaDevice device_;
  nb::object owner_;  // of the stream
  device::CudaStream stream_;
  bool is_on_callers_ = false;
  const char* owner_name_ = "cache";
  device::CudaEvent ready_;
  device::CudaEvent done_;
  device::CudaEvent kept_until_;
  KeptArrays kept_;
};

}  // namespace kvx::python
