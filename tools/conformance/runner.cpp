// Runs checks in processes of their own.
#include "tools/conformance/runner.hpp"

#include <fmt/ranges.h>

#include <cstring>
#include <stdexcept>

#include "tools/conformance/cuda_driver.hpp"
#include "tools/conformance/system.hpp"

namespace kvx::conformance {
namespace {

// Names of tasks; a check's is its number.
constexpr const char* kQueryTask = "query";
constexpr const char* kGpuTask = "gpu";

struct QueryAnswer {
  kvx_status_t status = KVX_STATUS_INTERNAL_ERROR;
  kvx_features_t features = {};
};

std::string complaint_of(const Check& check, const Provider& provider) {
  try {
    check.ask(provider);
    return "";
  } catch (const Failed& failed) {
    return failed.text;
  } catch (const std::exception& error) {
    return std::string("an exception: ") + error.what();
  }
}

TaskEnd ask(const Check& check, const Provider& provider) {
  const std::string complaint = complaint_of(check, provider);
  return {complaint.empty(), complaint};
}

// The answer's bytes.
TaskEnd query(const Provider& provider) {
  QueryAnswer answer;
  answer.features.size = sizeof answer.features;
  answer.status = provider.query_features(&answer.features);
  std::string bytes(sizeof answer, '\0');
  std::memcpy(bytes.data(), &answer, sizeof answer);
  return {true, bytes};
}

TaskEnd look_for_gpu() {
  return {CudaDriver::open().has_value(), ""};
}

}  // namespace

kvx_status_t query_in_child(const Provider& provider, kvx_features_t& features) {
  const TaskEnd end = run_in_child(kQueryTask, [&] { return query(provider); });
  QueryAnswer answer;
  if (!end.is_well || end.text.size() != sizeof answer) {
    throw std::runtime_error("kvx_query_features " + end.text);
  }
  std::memcpy(&answer, end.text.data(), sizeof answer);
  features = answer.features;
  return answer.status;
}

bool has_gpu() {
  return run_in_child(kGpuTask, look_for_gpu).is_well;
}

Result run_check(const std::vector<Check>& checks, size_t number, const Provider& provider,
                 const Features& claims, bool has_gpu) {
  const Check& check = checks[number];
  if (check.on_device && !has_gpu) return {&check, Outcome::kNotRun, "no GPU in this machine"};
  if (!claims.covers(check.needs)) {
    return {&check, Outcome::kAbsent,
            fmt::format("{}", fmt::join((check.needs - claims).names(), ", ")),
            check.needs - claims};
  }
  if (check.is_exported && !check.is_exported(provider)) {
    return {&check, Outcome::kAbsent, "the function of 1.2"};
  }
  const TaskEnd end = run_in_child(std::to_string(number), [&] { return ask(check, provider); });
  if (end.is_well) return {&check, Outcome::kPassed, ""};
  return {&check, Outcome::kFailed, end.text};
}

void do_task(const std::string& task, const std::string& library) {
  if (task == kGpuTask) end_task(look_for_gpu());
  const Provider provider = load_provider(library);
  if (task == kQueryTask) end_task(query(provider));
  end_task(ask(all_checks().at(std::stoul(task)), provider));
}

}  // namespace kvx::conformance
