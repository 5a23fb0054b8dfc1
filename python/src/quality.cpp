// CacheQuality: what a cache does to a model's predictions, from logits that Python passes; gates
// and retrieval texts, as the tool has them.
#include <nanobind/stl/function.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "python/src/arrays.hpp"
#include "python/src/bindings.hpp"
#include "python/src/context.hpp"
#include "python/src/errors.hpp"
#include "quality/cache_quality.hpp"
#include "quality/gate.hpp"
#include "quality/logits.hpp"
#include "quality/retrieval.hpp"

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

// (name, text, limit, whether it is a percentage, fails(value)) of each gate.
nb::list parse_gates(std::string_view text, bool of_stress) {
  nb::list list;
  const auto use = of_stress ? quality::GateUse::kStress : quality::GateUse::kCompare;
  for (const quality::Gate& gate : value_of(quality::parse_gates(text, use))) {
    list.append(
        nb::make_tuple(name_of(gate.figure), gate.text, gate.limit, gate.is_percent(),
                       nb::cpp_function([gate](double value) { return gate.fails(value); })));
  }
  return list;
}

// (mean, standard error) of numbers that come in clusters.
nb::tuple clustered_mean(const std::vector<std::vector<double>>& clusters) {
  quality::ClusteredMean mean;
  for (const std::vector<double>& cluster : clusters) mean.add_cluster(cluster);
  return nb::make_tuple(mean.mean(), mean.standard_error());
}

nb::tuple retrieval_tasks() {
  nb::list names;
  for (const quality::RetrievalTask task : quality::kRetrievalTasks) names.append(name_of(task));
  return nb::tuple(names);
}

// (text, [(question, answer, depth)]). count: the tokens of a text.
nb::tuple retrieval_text(int task, uint64_t seed, int64_t max_tokens,
                         const std::function<int64_t(std::string_view)>& count) {
  const auto counted = [&](std::string_view text) -> Result<int64_t> { return count(text); };
  const quality::RetrievalText made = value_of(
      quality::make_retrieval_text(quality::kRetrievalTasks[task], seed, max_tokens, counted));
  nb::list questions;
  for (const quality::Question& one : made.questions) {
    questions.append(nb::make_tuple(one.question, one.answer, one.depth));
  }
  return nb::make_tuple(made.text, questions);
}

}  // namespace

void bind_quality(nb::module_& module) {
  module.def("parse_gates", &parse_gates, nb::arg("text"), nb::arg("of_stress"));
  module.def("clustered_mean", &clustered_mean, nb::arg("clusters"));
  module.def("retrieval_tasks", &retrieval_tasks);
  module.def("retrieval_text", &retrieval_text, nb::arg("task"), nb::arg("seed"),
             nb::arg("max_tokens"), nb::arg("count"));
  nb::class_<CacheQuality>(module, "CacheQuality")
      .def(nb::init<>())
      .def("add_window", &add_window, nb::arg("base_logits").none(), nb::arg("logits").none(),
           nb::arg("targets"))
      .def("figures", &figures);
}

}  // namespace kvx::python
