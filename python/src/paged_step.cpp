// PagedStep: the cache's lock is taken to begin and to end; in between only the step's own.
#include "python/src/paged_step.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include "python/src/bindings.hpp"
#include "python/src/interrupt.hpp"

namespace kvx::python {

PagedStep::PagedStep(std::shared_ptr<CacheParts> parts)
    : parts_(std::move(parts)),
      cache_(parts_->cache),
      step_(std::make_unique<kv::KvStep>(*cache_)) {}

// In a forked child nobody may wait for the cache's threads.
PagedStep::~PagedStep() {
  if (parts_->context->home().is_this()) return;
  static_cast<void>(step_.release());
  static_cast<void>(new std::shared_ptr<kv::KvCache>(std::move(cache_)));
}

void PagedStep::begin(const Entries& entries) {
  locked([&] {
    std::vector<kv::StepEntry> step;
    int64_t tokens = 0;
    for (const auto& [sequence, num_tokens] : entries) {
      step.push_back({sequence, num_tokens});
      tokens += num_tokens;
    }
    throw_if_error(step_->begin(step));
    num_tokens_ = tokens;
  });
}

void PagedStep::append_and_attend(int layer, const AttentionArguments& given, nb::handle stream) {
  ArrayPlace place;
  if (parts_->lane) {
    place = parts_->lane->place_of(stream, {given.out, given.q, given.k, given.v, given.sinks});
  } else if (!stream.is_none()) {
    throw CoreError(invalid_argument("stream is given; a cache on the CPU has none"));
  }
  StepArrays arrays = step_arrays(given, cache_->config().geometry, parts_->lane.get(), place);
  locked([&] {
    check_rows_of(arrays);
    in_order(*parts_, place, arrays.kept, [&] {
      interruptibly([&] {
        throw_if_error(step_->append_and_attend(layer, arrays.params, arrays.q.rows, arrays.k.rows,
                                                arrays.v.rows, arrays.out.rows));
      });
    });
  });
}

void PagedStep::check_rows_of(const StepArrays& arrays) const {
  if (!step_->is_open()) throw CoreError(invalid_argument("no step is open; call begin() first"));
  if (arrays.q.num_tokens != num_tokens_) {
    throw CoreError(invalid_argument("q has {} tokens; the open step has {}", arrays.q.num_tokens,
                                     num_tokens_));
  }
  const int num_kv_heads = cache_->config().geometry.num_kv_heads;
  if (arrays.q.num_heads < 1 || arrays.q.num_heads % num_kv_heads != 0) {
    throw CoreError(invalid_argument("q has {} heads; expected a multiple of num_kv_heads, {}",
                                     arrays.q.num_heads, num_kv_heads));
  }
}

void PagedStep::end(const std::optional<std::vector<int>>& kept_tokens) {
  locked([&] {
    if (num_tokens_ > 0) throw_if_error(step_->check_rows());
    throw_if_error(kept_tokens ? step_->end(*kept_tokens) : step_->end());
    num_tokens_ = 0;
  });
}

void PagedStep::cancel() {
  locked([&] {
    throw_if_error(step_->cancel());
    num_tokens_ = 0;
  });
}

bool PagedStep::is_open() {
  return locked([&] { return step_->is_open(); });
}

void bind_paged_step(nb::module_& module) {
  nb::class_<PagedStep>(module, "PagedStep")
      .def("begin", &PagedStep::begin, nb::arg("entries"))
      .def(
          "append_and_attend",
          [](PagedStep& self, int layer, nb::handle q, nb::handle k, nb::handle v, nb::handle out,
             std::optional<float> softmax_scale, float softcap, nb::handle sinks, bool is_fast,
             nb::handle stream) {
            self.append_and_attend(layer, {q, k, v, out, sinks, softmax_scale, softcap, is_fast},
                                   stream);
          },
          nb::arg("layer"), nb::arg("q").none(), nb::arg("k").none(), nb::arg("v").none(),
          nb::arg("out").none(), nb::arg("softmax_scale").none(), nb::arg("softcap"),
          nb::arg("sinks").none(), nb::arg("is_fast"), nb::arg("stream").none())
      .def("end", &PagedStep::end, nb::arg("kept_tokens").none())
      .def("cancel", &PagedStep::cancel)
      .def_prop_ro("is_open", &PagedStep::is_open);
}

}  // namespace kvx::python
