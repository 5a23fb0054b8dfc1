// Gates of kvx stress: which caches fail, and where they are said to be worst.
#include "tools/kvx/stress/stress_gates.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

namespace kvx::tool::stress_gates_test {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

quality::Estimate estimate(double value) {
  return {value, 0};
}

RetrievalReport answers(quality::RetrievalTask task, int64_t length, double exact, double change) {
  RetrievalReport report{task, length, 8, {}};
  report.scores = {{estimate(100), estimate(0.1), estimate(0)},
                   {estimate(exact), estimate(0.1 + change), estimate(change)}};
  return report;
}

DriftPart drift(int64_t first, double kl) {
  return {first, 16, {estimate(0), estimate(kl)}, {estimate(100), estimate(90)}};
}

// A base that is perfect, and int4.
StressReport small_report() {
  StressReport report;
  report.caches.resize(2);
  report.caches[0].name = "bf16";
  report.caches[1].name = "int4";
  kv::LayerCounts counts;  // nothing that is not finite; 3 saturated numbers in K, 1 in V
  counts.k = {{0, 0}, {0, 3}};
  counts.v = {{0, 1}, {0, 0}};
  report.caches[1].saturation = {counts};
  report.retrieval = {answers(quality::RetrievalTask::kPasskey, 2048, 100, 0.02),
                      answers(quality::RetrievalTask::kPasskey, 4096, 50, 0.2),
                      answers(quality::RetrievalTask::kNeedles, 2048, 87.5, 0.1)};
  report.drift = {drift(0, 0.01), drift(16, 0.03), drift(32, 0.02)};
  return report;
}

std::vector<std::string> failures(const StressReport& report, std::string_view gates) {
  return failures_of(report, quality::parse_gates(gates, quality::GateUse::kStress).value());
}

TEST(StressGates, NameTheWorstLengthTaskAndPart) {
  EXPECT_THAT(
      failures(small_report(), "passkey<90%,needles<90%,nll>0.05,drift>0.01,saturated>0"),
      ElementsAre(
          "int4: passkey is 50 % at 4096 tokens, which --fail-if passkey<90% does not allow",
          "int4: needles is 87.5 % at 2048 tokens, which --fail-if needles<90% does not "
          "allow",
          "int4: nll is 0.2 in passkey at 4096 tokens, which --fail-if nll>0.05 does not "
          "allow",
          "int4: drift is 0.03 from token 16 to 31, which --fail-if drift>0.01 does not "
          "allow",
          "int4: saturated is 4, which --fail-if saturated>0 does not allow"));
}

TEST(StressGates, PassWhereNothingIsWorseThanTheirLimits) {
  EXPECT_THAT(failures(small_report(), "passkey<50%,nll>0.2,drift>0.03,nonfinite>0"), IsEmpty());
}

TEST(StressGates, FailWhereAFigureIsNoNumber) {
  StressReport report = small_report();
  report.drift[0].kl[1] = estimate(std::numeric_limits<double>::quiet_NaN());
  EXPECT_THAT(failures(report, "drift>1"),
              ElementsAre("int4: drift is nan from token 0 to 15, which --fail-if drift>1 does not "
                          "allow"));
}

TEST(StressGates, LeaveTheBaseAlone) {
  StressReport report = small_report();
  report.caches.pop_back();
  EXPECT_THAT(failures(report, "nll>-1,drift>-1"), IsEmpty());
}

}  // namespace
}  // namespace kvx::tool::stress_gates_test
