// The exchange table is an attribute of the type, in a capsule. It is read once a type.
#include "python/src/exchange.hpp"

#include <nanobind/stl/string.h>

#include <string>
#include <unordered_map>

#include "python/src/cuda_stream.hpp"

namespace kvx::python {
namespace {

namespace nb = nanobind;

// The layout of DLPackExchangeAPI, version 1 (dlpack.h of DLPack 1.2 and later), up to what is
// used.
struct ExchangeTable {
  struct Version {
    uint32_t major;
    uint32_t minor;
  } version;
  ExchangeTable* previous;
  void* managed_tensor_allocator;
  void* managed_tensor_from_py_object;
  void* managed_tensor_to_py_object;
  int (*dltensor_from_py_object)(void* object, nb::dlpack::dltensor* out);  // may be null
  int (*current_work_stream)(int32_t device_type, int32_t device_id, void** out);
};

constexpr uint32_t kMajorVersion = 1;
constexpr size_t kMaxTypes = 64;  // bounds what a program that makes types for ever uses

const ExchangeTable* find_exchange(nb::handle type) {
  PyObject* capsule = PyObject_GetAttrString(type.ptr(), "__dlpack_c_exchange_api__");
  if (capsule == nullptr) {
    PyErr_Clear();
    return nullptr;
  }
  const auto* table =
      static_cast<const ExchangeTable*>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
  Py_DECREF(capsule);
  if (table == nullptr) PyErr_Clear();
  while (table != nullptr && table->version.major != kMajorVersion) table = table->previous;
  return table;
}

struct TypeFacts {
  const ExchangeTable* exchange = nullptr;
  bool has_is_neg = false;    // torch's tensors, whose sign may be kept apart from the numbers
  bool is_immutable = false;  // JAX's arrays, whose capsules have no such flag
  bool is_of_cupy = false;
};

bool is_of(nb::handle type, const char* library) {
  return nb::cast<std::string>(type.attr("__module__")).starts_with(library);
}

TypeFacts find_facts(nb::handle type) {
  return {find_exchange(type), nb::hasattr(type, "is_neg"), is_of(type, "jax"),
          is_of(type, "cupy")};
}

// Valid until the next call.
const TypeFacts& facts_of(nb::handle type) {
  // The map keeps its types alive, so that no other type gets their address.
  static auto& facts_by_type = *new std::unordered_map<PyObject*, TypeFacts>;
  static PyObject* last_type = nullptr;  // most calls have arrays of one type
  static TypeFacts* last_facts = nullptr;
  if (type.ptr() == last_type) return *last_facts;
  auto found = facts_by_type.find(type.ptr());
  if (found == facts_by_type.end()) {
    if (facts_by_type.size() == kMaxTypes) {
      static TypeFacts of_one_more;
      return of_one_more = find_facts(type);
    }
    found = facts_by_type.emplace(type.inc_ref().ptr(), find_facts(type)).first;
  }
  last_type = found->first;
  last_facts = &found->second;
  return found->second;
}

}  // namespace

bool exchange(nb::handle object, nb::dlpack::dltensor& tensor) {
  const ExchangeTable* table = facts_of(object.type()).exchange;
  if (table == nullptr || table->dltensor_from_py_object == nullptr) return false;
  if (table->dltensor_from_py_object(object.ptr(), &tensor) == 0) {
    return tensor.ndim == 0 || tensor.strides != nullptr;
  }
  PyErr_Clear();
  return false;
}

bool is_negated(nb::handle object) {
  if (!facts_of(object.type()).has_is_neg) return false;
  // Interned once: the name is looked up for every tensor of every call.
  static PyObject* const name = PyUnicode_InternFromString("is_neg");
  return object.attr(nb::handle(name))().is(nb::handle(Py_True));
}

bool owns_its_memory(nb::handle object) {
  const TypeFacts& facts = facts_of(object.type());
  return facts.has_is_neg || facts.is_of_cupy || facts.is_immutable;
}

std::optional<device::CudaStream> current_stream(nb::handle object, int cuda_device) {
  const TypeFacts& facts = facts_of(object.type());
  if (facts.exchange != nullptr && facts.exchange->current_work_stream != nullptr) {
    void* stream = nullptr;
    if (facts.exchange->current_work_stream(nb::device::cuda::value, cuda_device, &stream) == 0) {
      return stream;
    }
    PyErr_Clear();  // a build of the library without CUDA
    return std::nullopt;
  }
  if (facts.is_of_cupy) {
    const nb::object stream =
        nb::module_::import_("cupy.cuda").attr("get_current_stream")(cuda_device);
    return stream_of(stream);
  }
  if (facts.has_is_neg) {  // torch before it had the exchange API
    const nb::module_ torch = nb::module_::import_("torch.cuda");
    if (!nb::cast<bool>(torch.attr("is_available")())) return std::nullopt;
    return stream_of(torch.attr("current_stream")(cuda_device));
  }
  return std::nullopt;
}

bool is_immutable(nb::handle object) {
  return facts_of(object.type()).is_immutable;
}

}  // namespace kvx::python
