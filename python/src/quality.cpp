// CacheQuality: what a cache does to a model's predictions, from logits that Python passes.
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "python/src/arrays.hpp"
#include "python/src/bindings.hpp"
#include "python/src/context.hpp"
#include "python/src/errors.hpp"
#include "quality/cache_quality.hpp"
#include "quality/logits.hpp"

namespace kvx::python {
namespace {

using quality::CacheQuality;
using quality::ScoredToken;

// [tokens, 1, vocabulary]
InputRows logit_rows(nb::handle object, const char* name, int64_t tokens, int64_t vocabulary) {
  InputRows rows = input_rows(object, name, {tokens, 1, vocabulary});
  if (rows.rows.dtype != DType::kF32) {
    throw CoreError(invalid_argument("{} is 16 bits wide; expected float32", name));
  }
  return rows;
}

std::span<const float> row_of(const InputRows& rows, int64_t token, int64_t vocabulary) {
  const auto* first = static_cast<const float*>(rows.array.data());
  return {first + token * rows.array.stride(0), static_cast<size_t>(vocabulary)};
}

void add_window(CacheQuality& quality, nb::handle base, nb::handle logits,
                const std::vector<int>& targets) {
  const auto tokens = static_cast<int64_t>(targets.size());
  const InputRows base_rows = logit_rows(base, "base_logits", tokens, -1);
  const auto vocabulary = static_cast<int64_t>(base_rows.array.shape(2));
  const InputRows rows = logit_rows(logits, "logits", tokens, vocabulary);
  for (const int target : targets) {
    if (target >= 0 && target < vocabulary) continue;
    throw CoreError(
        out_of_range("targets has the token {}; expected 0 to {}", target, vocabulary - 1));
  }
  const auto context = current_context();

  nb::gil_scoped_release no_gil;
  std::vector<ScoredToken> scores(targets.size());
  context->cpu().executor->parallel_for(static_cast<int>(tokens), [&](int token) {
    const std::span<const float> p = row_of(base_rows, token, vocabulary);
    const std::span<const float> q = row_of(rows, token, vocabulary);
    const quality::LogitSummary p_summary = quality::summarize(p);
    const quality::LogitSummary q_summary = quality::summarize(q);
    scores[token] = {quality::negative_log_likelihood(p, p_summary, targets[token]),
                     quality::negative_log_likelihood(q, q_summary, targets[token]),
                     quality::kl_divergence(p, p_summary, q, q_summary),
                     p_summary.top == q_summary.top};
  });
  quality.add_window(scores);
}

nb::tuple pair_of(const quality::Estimate& estimate) {
  return nb::make_tuple(estimate.value, estimate.standard_error);
}

nb::dict figures(const CacheQuality& quality) {
  nb::dict dict;
  dict["perplexity"] = pair_of(quality.perplexity());
  dict["change_percent"] = pair_of(quality.change_percent());
  dict["kl"] = pair_of(quality.kl());
  dict["same_top_percent"] = pair_of(quality.same_top_percent());
  return dict;
}

}  // namespace

void bind_quality(nb::module_& module) {
  nb::class_<CacheQuality>(module, "CacheQuality")
      .def(nb::init<>())
      .def("add_window", &add_window, nb::arg("base_logits").none(), nb::arg("logits").none(),
           nb::arg("targets"))
      .def("figures", &figures);
}

}  // namespace kvx::python
