// The exchange table hangs on the type, in a capsule; looked up once a type.
#include "python/src/exchange.hpp"

#include <nanobind/stl/string.h>

#include <string>
#include <unordered_map>

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
};
using Exchange = decltype(ExchangeTable::dltensor_from_py_object);

constexpr uint32_t kMajorVersion = 1;
constexpr size_t kMaxTypes = 64;  // a program that makes types for ever is not remembered

Exchange find_exchange(nb::handle type) {
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
  return table == nullptr ? nullptr : table->dltensor_from_py_object;
}

struct TypeFacts {
  Exchange exchange = nullptr;
  bool has_is_neg = false;    // torch's tensors, whose sign may be kept apart from the numbers
  bool is_immutable = false;  // JAX's arrays, whose capsules do not say so
};

bool is_of_jax(nb::handle type) {
  return nb::cast<std::string>(type.attr("__module__")).starts_with("jax");
}

TypeFacts facts_of(nb::handle type) {
  // Types that are remembered stay alive, so that no other takes their address.
  static auto& known = *new std::unordered_map<PyObject*, TypeFacts>;
  const auto found = known.find(type.ptr());
  if (found != known.end()) return found->second;
  const TypeFacts facts{find_exchange(type), nb::hasattr(type, "is_neg"), is_of_jax(type)};
  if (known.size() < kMaxTypes) known.emplace(type.inc_ref().ptr(), facts);
  return facts;
}

}  // namespace

bool exchange(nb::handle object, nb::dlpack::dltensor& tensor) {
  const Exchange function = facts_of(object.type()).exchange;
  if (function == nullptr) return false;
  if (function(object.ptr(), &tensor) == 0) return tensor.ndim == 0 || tensor.strides != nullptr;
  PyErr_Clear();
  return false;
}

bool is_negated(nb::handle object) {
  return facts_of(object.type()).has_is_neg && nb::cast<bool>(object.attr("is_neg")());
}

bool is_immutable(nb::handle object) {
  return facts_of(object.type()).is_immutable;
}

}  // namespace kvx::python
