// A Python object as a store: register_store() and unregister_store(). Its calls come from threads
// of the core's own, which take the GIL for as long as a call lasts.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>

#include "python/src/bindings.hpp"
#include "python/src/errors.hpp"
#include "python/src/text.hpp"
#include "tier/store/store_registry.hpp"

namespace kvx::python {

namespace nb = nanobind;

namespace {

using tier::StoreGet;
using tier::StorePut;

// Whether Python may still be called: an interpreter that ends takes threads with it that ask for
// the GIL.
class Gate {
 public:
  bool enter() {
    const std::lock_guard lock(mutex_);
    if (!is_closed_) ++num_inside_;
    return !is_closed_;
  }
  void leave() {
    const std::lock_guard lock(mutex_);
    --num_inside_;
    left_.notify_all();
  }
  // From now on nobody enters; waits a while for those who are inside.
  void close() {
    constexpr auto kMostWait = std::chrono::seconds(5);
    std::unique_lock lock(mutex_);
    is_closed_ = true;
    left_.wait_for(lock, kMostWait, [this] { return num_inside_ == 0; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable left_;
  int num_inside_ = 0;
  bool is_closed_ = false;
};

// Never destroyed: calls may outlive static objects.
Gate& gate() {
  static auto* const one = new Gate;
  return *one;
}

class Inside {
 public:
  Inside() : is_inside_(gate().enter()) {}
  ~Inside() {
    if (is_inside_) gate().leave();
  }
  Inside(const Inside&) = delete;
  Inside& operator=(const Inside&) = delete;
  explicit operator bool() const { return is_inside_; }

 private:
  bool is_inside_;
};

nb::object bytes_of(std::span<const uint8_t> bytes) {
  return nb::steal(PyBytes_FromStringAndSize(reinterpret_cast<const char*>(bytes.data()),
                                             static_cast<Py_ssize_t>(bytes.size())));
}

// The bytes of a bytes-like object, as long as it lives.
class Buffer {
 public:
  explicit Buffer(nb::handle object) {
    if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_SIMPLE) != 0) throw nb::python_error();
  }
  ~Buffer() { PyBuffer_Release(&view_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  std::span<const uint8_t> bytes() const {
    return {static_cast<const uint8_t*>(view_.buf), static_cast<size_t>(view_.len)};
  }

 private:
  Py_buffer view_{};
};

// An answer with an element for each of `count` keys.
nb::list answers_of(const char* call, const nb::object& answer, size_t count) {
  PyObject* const list = PySequence_List(answer.ptr());
  if (list == nullptr) throw nb::python_error();
  auto answers = nb::steal<nb::list>(list);
  if (nb::len(answers) == count) return answers;
  throw CoreError(
      internal_error("the store's {} returned {} answers; expected one for each of {} "
                     "keys",
                     call, nb::len(answers), count));
}

bool is_true(nb::handle object) {
  const int answer = PyObject_IsTrue(object.ptr());
  if (answer < 0) throw nb::python_error();
  return answer == 1;
}

class PythonStore final : public tier::RemoteStore {
 public:
  explicit PythonStore(nb::object object) : object_(object.release()) {}
  ~PythonStore() override {
    const Inside inside;
    if (!inside) return;  // it goes with the interpreter
    const nb::gil_scoped_acquire gil;
    object_.dec_ref();
  }

  Status put(std::span<StorePut> items) override {
    return call("put", [&] {
      nb::list keys, values;
      for (const StorePut& item : items) {
        keys.append(item.key);
        values.append(bytes_of(item.value));
      }
      const nb::object answer = object_.attr("put")(keys, values);
      const bool keeps_all = answer.is_none();
      const nb::list answers = keeps_all ? nb::list() : answers_of("put", answer, items.size());
      for (size_t i = 0; i < items.size(); ++i) {
        items[i].is_stored = keeps_all || is_true(answers[i]);
      }
    });
  }

  Status get(std::span<StoreGet> items) override {
    return call("get", [&] {
      nb::list keys;
      for (const StoreGet& item : items) keys.append(item.key);
      const nb::list answers = answers_of("get", object_.attr("get")(keys), items.size());
      for (size_t i = 0; i < items.size(); ++i) {
        items[i].num_bytes = -1;
        if (answers[i].is_none()) continue;
        const Buffer value(answers[i]);
        if (value.bytes().size() > items[i].buffer.size()) continue;
        std::ranges::copy(value.bytes(), items[i].buffer.begin());
        items[i].num_bytes = std::ssize(value.bytes());
      }
    });
  }

  Status exists(std::span<const std::string> keys, std::span<uint8_t> has) override {
    return call("exists", [&] {
      const nb::list answers =
          answers_of("exists", object_.attr("exists")(list_of(keys)), keys.size());
      for (size_t i = 0; i < keys.size(); ++i) has[i] = is_true(answers[i]) ? 1 : 0;
    });
  }

  Status remove(std::span<const std::string> keys) override {
    return call("remove", [&] { object_.attr("remove")(list_of(keys)); });
  }

  Status remove_all(std::string_view parts) override {
    return call("remove_all", [&] { object_.attr("remove_all")(std::string(parts)); });
  }

 private:
  static nb::list list_of(std::span<const std::string> keys) {
    nb::list list;
    for (const std::string& key : keys) list.append(key);
    return list;
  }

  template <class Body>
  static Status call(const char* name, const Body& body) {
    const Inside inside;
    if (!inside) return internal_error("the interpreter ends");
    const nb::gil_scoped_acquire gil;
    try {
      body();
      return {};
    } catch (const nb::python_error& error) {
      return internal_error("the store's {} raised {}: {}", name,
                            nb::cast<std::string>(error.type().attr("__name__")),
                            nb::cast<std::string>(nb::str(error.value())));
    } catch (const CoreError& error) {
      return internal_error("{}", error.message());
    }
  }

  const nb::handle object_;
};

void register_python_store(const std::string& name, nb::object store) {
  throw_if_error(tier::register_store(name, std::make_shared<PythonStore>(std::move(store))));
}

// Without the GIL: the store's end asks for it.
void unregister_python_store(const std::string& name) {
  const nb::gil_scoped_release no_gil;
  throw_if_error(tier::unregister_store(name));
}

void close_stores() {
  const nb::gil_scoped_release no_gil;
  gate().close();
}

}  // namespace

void bind_stores(nb::module_& module) {
  module.def("register_store", &register_python_store, nb::arg("name"), nb::arg("store"));
  module.def("unregister_store", &unregister_python_store, nb::arg("name"));
  module.def(
      "registered_stores",
      [] {
        nb::list names;
        for (const std::string& name : tier::registered_stores()) names.append(text_of(name));
        return names;
      },
      "Names of store(NAME), in the order of the alphabet.");
  module.def("close_stores", &close_stores, "Before the interpreter ends: no store is called.");
}

}  // namespace kvx::python
