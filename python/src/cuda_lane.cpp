// Two events tie a verb to the caller's stream where that is another one than the cache's.
#include "python/src/cuda_lane.hpp"

#include <charconv>
#include <string_view>

#include "device/cuda_caller.hpp"
#include "python/src/cuda_stream.hpp"
#include "python/src/errors.hpp"
#include "python/src/exchange.hpp"

namespace kvx::python {
namespace {

// cuda, or cuda:N
int device_index(const std::string& text) {
  constexpr std::string_view kCuda = "cuda";
  if (text == kCuda) return 0;
  int index = 0;
  const char* end = text.data() + text.size();
  if (text.starts_with("cuda:") && text.size() > kCuda.size() + 1) {
    const auto [stop, error] = std::from_chars(text.data() + kCuda.size() + 1, end, index);
    if (error == std::errc() && stop == end && index >= 0) return index;
  }
  throw CoreError(invalid_argument("device is '{}'; expected cpu, cuda or cuda:N", text));
}

const device::CudaDevice& device_of(const std::string& text) {
  const auto device = device::known_cuda_device(device_index(text));
  if (device.ok()) return *device.value();
  throw CoreError(
      {device.error().code, fmt::format("device is '{}': {} (docs/python.md, \"On a GPU\", "
                                        "lists what it needs)",
                                        text, device.error().message)});
}

device::CudaEvent new_event(int device) {
  const auto current = value_of(device::CurrentCudaDevice::set(device));
  return value_of(device::CudaEvent::create());
}

}  // namespace

CudaLane::CudaLane(const std::string& device, nb::handle stream)
    : CudaLane(device_of(device), stream) {}

CudaLane::CudaLane(const device::CudaDevice& device, nb::handle stream)
    : device_(device),
      owner_(nb::borrow(stream)),
      stream_(stream.is_none() ? nullptr : stream_of(stream)),
      ready_(new_event(device.index)),
      done_(new_event(device.index)),
      kept_until_(new_event(device.index)) {}

std::unique_ptr<CudaLane> CudaLane::of_callers(const std::string& device, const char* owner) {
  std::unique_ptr<CudaLane> lane(new CudaLane(device_of(device), nb::none()));
  lane->is_on_callers_ = true;
  lane->owner_name_ = owner;
  return lane;
}

kv::CudaPlacement CudaLane::placement(int max_step_tokens) const {
  return {{device_, stream_}, max_step_tokens};
}

ArrayPlace CudaLane::place_of(nb::handle stream, std::initializer_list<nb::handle> arrays) const {
  ArrayPlace place{device_.index, stream_, stream_, true, owner_name_};
  bool has_stream = !stream.is_none();
  if (has_stream) place.stream = place.also_behind = stream_of(stream);
  for (const nb::handle array : arrays) {
    if (array.is_none()) continue;
    const auto current = current_stream(array, device_.index);
    if (!current) {
      place.are_all_ready = false;
    } else if (!has_stream) {
      place.stream = place.also_behind = *current;
      has_stream = true;
    } else if (*current != place.stream && place.also_behind == place.stream) {
      place.also_behind = *current;
    } else if (*current != place.stream && *current != place.also_behind) {
      place.are_all_ready = false;
    }
  }
  return place;
}

void CudaLane::keep(KeptArrays& kept, const ArrayPlace& place, nb::handle object,
                    const nb::ndarray<nb::ro>& array) const {
  if (place.are_all_ready || !array.is_valid()) return;
  if (!current_stream(object, device_.index)) kept.push_back(array);
}

Status CudaLane::put_behind(device::CudaStream stream, device::CudaStream work) {
  if (stream == work) return {};
  KVX_RETURN_IF_ERROR(ready_.record(stream));
  return ready_.hold_back(work);
}

Status CudaLane::begin(const ArrayPlace& place, const KeptArrays& kept) {
  const device::CudaStream work = work_stream(place);
  if (place.stream == work && place.also_behind == work && kept.empty()) return {};
  KVX_ASSIGN_OR_RETURN(const auto current, device::CurrentCudaDevice::set(device_.index));
  if (!kept.empty()) KVX_RETURN_IF_ERROR(kept_until_.wait());
  if (place.also_behind != place.stream) KVX_RETURN_IF_ERROR(put_behind(place.also_behind, work));
  return put_behind(place.stream, work);
}

Status CudaLane::end(const ArrayPlace& place, KeptArrays& kept) {
  const device::CudaStream work = work_stream(place);
  if (place.stream == work && kept.empty()) return {};
  KVX_ASSIGN_OR_RETURN(const auto current, device::CurrentCudaDevice::set(device_.index));
  if (!kept.empty()) {
    KVX_RETURN_IF_ERROR(kept_until_.record(work));
    kept_.swap(kept);
  }
  if (place.stream == work) return {};
  KVX_RETURN_IF_ERROR(done_.record(work));
  return done_.hold_back(place.stream);
}

}  // namespace kvx::python
