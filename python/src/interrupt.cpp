// The handler runs here, with the GIL for as long as it takes; what it raised waits for the verb's
// end, where nothing of the verb is under way any more.
#include "python/src/interrupt.hpp"

namespace kvx::python {
namespace {

namespace nb = nanobind;

// A person does not notice it, and the GIL is not asked for often.
constexpr std::chrono::milliseconds kBetweenQuestions(50);

unsigned long main_thread = 0;

}  // namespace

void remember_main_thread() {
  main_thread = nb::cast<unsigned long>(
      nb::module_::import_("threading").attr("main_thread")().attr("ident"));
}

Interruptible::Interruptible()
    : thread_(std::this_thread::get_id()),
      hears_signals_(PyThread_get_thread_ident() == main_thread),
      last_asked_(std::chrono::steady_clock::now()) {
  set_stop_wish(this);
}

Interruptible::~Interruptible() {
  set_stop_wish(nullptr);
  if (raised_ == nullptr) return;
  const nb::gil_scoped_acquire gil;
  Py_DECREF(raised_);
}

bool Interruptible::is_there() {
  if (is_interrupted_.load(std::memory_order_relaxed)) return true;
  if (!hears_signals_ || std::this_thread::get_id() != thread_) return false;
  const auto now = std::chrono::steady_clock::now();
  if (now - last_asked_ < kBetweenQuestions) return false;
  last_asked_ = now;
  const nb::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() == 0) return false;
  PyObject* type = nullptr;
  PyObject* traceback = nullptr;
  PyErr_Fetch(&type, &raised_, &traceback);
  PyErr_NormalizeException(&type, &raised_, &traceback);
  Py_XDECREF(type);
  Py_XDECREF(traceback);
  is_interrupted_ = true;
  return true;
}

void Interruptible::check() {
  if (raised_ == nullptr) return;
  const nb::gil_scoped_acquire gil;
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(raised_)), raised_);
  throw nb::python_error();
}

}  // namespace kvx::python
