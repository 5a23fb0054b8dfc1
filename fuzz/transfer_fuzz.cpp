// Messages of a transfer from a hostile peer: they are read or refused, and what is read can be
// written again, field by field.
#include <algorithm>
#include <cstdlib>

#include "device/cuda_ipc.hpp"
#include "transfer/messages.hpp"

namespace {

using namespace kvx::transfer;

bool is_same(const Request& a, const Request& b) {
  return a.kind == b.kind && a.export_id == b.export_id && a.offset == b.offset &&
         a.bytes == b.bytes && a.record == b.record && a.heads == b.heads &&
         a.first_page == b.first_page && a.end_page == b.end_page && a.is_mapped == b.is_mapped &&
         a.is_taken == b.is_taken && a.text == b.text;
}

bool is_same(const Answer& a, const Answer& b) {
  return a.kind == b.kind && a.export_id == b.export_id && a.bytes == b.bytes &&
         a.offset == b.offset && a.record == b.record && a.num_parts == b.num_parts &&
         a.first_page == b.first_page && a.num_layers == b.num_layers && a.path == b.path &&
         a.ipc_handle == b.ipc_handle && a.pool_order == b.pool_order && a.process == b.process &&
         a.text == b.text && std::ranges::equal(a.data, b.data);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::span<const uint8_t> bytes(data, size);
  if (const auto request = parse_request(bytes); request.ok()) {
    const auto again = parse_request(encode(request.value()));
    if (!again.ok() || !is_same(again.value(), request.value())) std::abort();
  }
  if (const auto answer = parse_answer(bytes); answer.ok()) {
    std::vector<uint8_t> written = encode(answer.value());
    written.insert(written.end(), answer.value().data.begin(), answer.value().data.end());
    const auto again = parse_answer(written);
    if (!again.ok() || !is_same(again.value(), answer.value())) std::abort();
    // Without a GPU no handle is one; whatever it is, it is refused with words.
    const std::string& handle = answer.value().ipc_handle;
    const auto mapped = kvx::device::CudaIpcMemory::open(
        0, {reinterpret_cast<const uint8_t*>(handle.data()), handle.size()});
    if (!mapped.ok() && mapped.error().message.empty()) std::abort();
  }
  return 0;
}
