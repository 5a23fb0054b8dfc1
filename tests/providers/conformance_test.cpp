// kvx-conformance passes correct providers and fails every faulty one in the check that names its
// fault.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>

#include "tests/support/find_words.hpp"

namespace {

using kvx::tests::find_words;

using Json = nlohmann::json;

struct Judgement {
  int exit_code;
  std::string text;
};

// The standard output and error of kvx-conformance.
Judgement run_kit(const std::string& arguments) {
  FILE* pipe = popen((std::string(KVX_CONFORMANCE) + " " + arguments + " 2>&1").c_str(), "r");
  Judgement run{};
  char part[4096];
  for (size_t n; (n = fread(part, 1, sizeof part, pipe)) > 0;) run.text.append(part, n);
  run.exit_code = WEXITSTATUS(pclose(pipe));
  return run;
}

std::string provider(const std::string& name) {
  return std::string(KVX_PROVIDERS) + "/" + name + ".so";
}

struct Broken {
  const char* fault;  // as in fault.h
  const char* check;  // that must fail
};

const Broken kBroken[] = {
    {"MOVES_NOTHING", "write F16 NHD"},
    {"IGNORES_STRIDES", "write F16 NHD, halves of a fused tensor"},
    {"HND_AS_NHD", "write F16 HND"},
    {"V_PACK_OF_K", "write F16 HND_PACKED, K by 4 and V by 1"},
    {"SLOT_OFF_BY_ONE", "write every slot alone"},
    {"BLOCK_SIZE_OFF", "write every slot alone"},
    {"WRITES_INVALID_SLOT", "skip invalid_slot, whatever its value"},
    {"WRITES_NEGATIVE_SLOT", "skip negative slots"},
    {"OUT_OF_RANGE_IS_SILENT", "report slots outside the cache, having written nothing"},
    {"WRITES_BEFORE_IT_CHECKS", "report slots outside the cache, having written nothing"},
    {"SLOTS_IN_32_BITS", "write nothing outside the cache"},
    {"NULL_INDEX_IS_NEGATIVE", "follow bit 31 to the secondary pool"},
    {"SECONDARY_IGNORED", "follow bit 31 to the secondary pool"},
    {"V_INDEX_OF_K", "gather KV_OFFSETS HND"},
    {"BEAM_IGNORED", "follow beams"},
    {"READS_BEHIND_THE_TABLE", "read no entry behind the table"},
    {"READS_BLOCKS_OUTSIDE", "read nothing outside the cache"},
    {"RAGGED_AS_PAGES", "follow RAGGED token by token"},
    {"LENGTHS_IGNORED", "gather no more than length and max_seq_len"},
    {"MAX_SEQ_LEN_IGNORED", "gather no more than length and max_seq_len"},
    {"UNMAPPED_IS_BLOCK_ZERO", "leave rows of negative entries alone, PACKED"},
    {"SCALE_INVERTED", "write F8_E4M3 PER_TENSOR"},
    {"SCALE_OF_K_FOR_V", "write F8_E4M3 PER_TENSOR"},
    {"SCALE_PER_HEAD_BY_BLOCK", "write F8_E4M3 PER_HEAD"},
    {"FALLBACK_SCALE_IGNORED", "write F8_E4M3 with k_scale and v_scale"},
    {"BAD_SCALES_TAKEN", "refuse scales that are not positive and finite"},
    {"ROUNDS_TOWARDS_ZERO", "write rounds to nearest even"},
    {"VERSION_WRITES_16_BYTES", "version fits into the caller's size"},
    {"SIZES_UNCHECKED", "refuse structs that are too small, in writes"},
    {"COUNTS_IN_32_BITS", "multiply counts in 64 bits"},
    {"UNSUPPORTED_BEFORE_INVALID", "malformed comes before unsupported"},
    {"PLAN_IS_STATIC", "write at the same time"},
    {"KEEPS_POINTERS", "keep no pointer after a call"},
    {"K_AND_V_CHANGE_PLACES", "gather PACKED NHD"},
    {"ENDS_THE_PROCESS", "write F16 NHD"},
    {"WRITES_ONE_TOO_MANY", "write every slot alone"},
};

// The faults of a wrapper of libkvx.so (verb_fault.h).
const Broken kBrokenVerbs[] = {
    {"GIVEN_SCALE_INVERTED", "append fp8_e4m3 under a scale for all"},
    {"LAST_CODE_DIFFERS", "append int8 NHD"},
    {"NEGATIVE_SLOT_IS_ZERO", "append bf16 NHD"},
    {"COUNTED_SLOT_IS_WRITTEN", "append counts slots beyond and writes none"},
    {"WRITES_BEFORE_IT_REFUSES", "append refuses slots beyond, having written nothing"},
    {"EARLIER_TOKEN_STAYS", "append of equal slots"},
    {"TRANSFORM_FORGOTTEN", "append with transforms"},
    {"NONFINITE_UNCOUNTED", "append counts values that codes cannot represent"},
    {"TRANSFORM_NOT_UNDONE", "gather undoes transforms"},
    {"RANGE_OFF_BY_ONE", "gather ranges"},
    {"FIRST_ROW_IGNORED", "gather ranges"},
    {"NUM_ROWS_IGNORED", "gather refuses rows outside"},
    {"WINDOW_OFF_BY_ONE", "attend with a window"},
    {"SINKS_IGNORED", "attend with sinks"},
    {"SOFTCAP_IGNORED", "attend with a softcap"},
    {"NOT_CAUSAL", "attend int8"},
    {"TREE_MASK_IGNORED", "attend with a tree mask"},
    {"FULL_PRECISION_WINDOW_IGNORED", "attend with full-precision window"},
    {"LSE_IN_BASE_TWO", "attend with an LSE"},
    {"LAST_TOKEN_LOST", "attend bf16"},
    {"COPIES_WHOLE_BLOCKS", "copy int8 blocks as they are stored"},
    {"SLOTS_CHANGE_PLACES", "transcode bf16 to fp8_e4m3"},
    {"PAGES_WITHOUT_SCALES", "pages of int8"},
};

std::string lower(std::string text) {
  for (char& c : text) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return text;
}

TEST(Conformance, PassesKvxWithEverythingThatItClaims) {
  const Judgement run = run_kit(std::string(KVX_LIBRARY) + " --claims queried --json");
  ASSERT_EQ(run.exit_code, 0) << run.text;
  const Json report = Json::parse(run.text);
  EXPECT_TRUE(report["conforms"].get<bool>());
  for (const Json& check : report["checks"]) {
    if (check["section"] == "Device memory") continue;  // absent on a machine with a GPU
    EXPECT_EQ(check["outcome"], "passed") << check["name"];
  }
  EXPECT_GT(report["passed"].get<int>(), 500);
  EXPECT_TRUE(report["not_judged"].empty() || report["not_judged"] == Json({"memory DEVICE"}))
      << report["not_judged"];
}

TEST(Conformance, PassesKvxAsAProviderOf11) {
  const Judgement run = run_kit(std::string(KVX_LIBRARY) + " --claims v1.1");
  EXPECT_EQ(run.exit_code, 0) << run.text;
  EXPECT_NE(run.text.find("CONFORMS (v1.1 claims)"), std::string::npos) << run.text;
}

TEST(Conformance, PassesASecondProviderWrittenFromTheSpecification) {
  for (const char* claims : {"queried", "v1.1"}) {
    const Judgement run = run_kit(provider("slow_provider") + " --claims " + claims);
    EXPECT_EQ(run.exit_code, 0) << run.text;
  }
}

// sound: the provider without the fault.
void expect_caught(const Broken& broken, const std::string& sound) {
  SCOPED_TRACE(broken.fault);
  const std::string filter = std::string(" --json --filter \"") + broken.check + "\"";
  const Judgement run = run_kit(provider("broken_" + lower(broken.fault)) + filter);
  EXPECT_EQ(run.exit_code, 1) << run.text;
  const Json report = Json::parse(run.text);
  std::set<std::string> failed;
  for (const Json& check : report["checks"]) {
    if (check["outcome"] == "failed" && check["reason"] != "") failed.insert(check["name"]);
  }
  EXPECT_TRUE(failed.contains(broken.check)) << run.text;
  EXPECT_EQ(run_kit(provider(sound) + filter).exit_code, 0);
}

TEST(Conformance, CatchesEveryBrokenProviderByTheCheckThatNamesItsFault) {
  for (const Broken& broken : kBroken) expect_caught(broken, "slow_provider");
}

TEST(Conformance, CatchesEveryBrokenVerbByTheCheckThatNamesItsFault) {
  for (const Broken& broken : kBrokenVerbs) expect_caught(broken, "wrapped_kvx");
}

// The enumerators of a header without the first.
std::set<std::string> faults_in(const std::string& header) {
  std::ifstream file(KVX_SOURCE_DIR "/tests/providers/" + header);
  const std::string text(std::istreambuf_iterator<char>(file), {});
  std::set<std::string> faults = find_words(text, "\n  ([A-Z_0-9]+)");
  faults.erase("NO_FAULT");
  faults.erase("NO_VERB_FAULT");
  return faults;
}

TEST(Conformance, HasABrokenProviderForEveryFault) {
  std::set<std::string> broken;
  for (const Broken& b : kBroken) broken.insert(b.fault);
  EXPECT_EQ(broken, faults_in("fault.h"));
  broken.clear();
  for (const Broken& b : kBrokenVerbs) broken.insert(b.fault);
  EXPECT_EQ(broken, faults_in("verb_fault.h"));
}

TEST(Conformance, SaysWhatFailedAndGoesOnAfterACrash) {
  const Judgement run = run_kit(provider("broken_reads_behind_the_table"));
  EXPECT_EQ(run.exit_code, 1);
  EXPECT_NE(run.text.find("touches memory outside the call's buffers"), std::string::npos)
      << run.text;
  EXPECT_NE(run.text.find("DOES NOT CONFORM"), std::string::npos) << run.text;
}

// Whatever this machine has, a device check is never absent or passed without a GPU.
TEST(Conformance, NeverCallsADeviceCheckAbsentOrPassedWithoutAGpu) {
  const Json report = Json::parse(run_kit(provider("slow_provider") + " --json").text);
  bool has_gpu = true;
  for (const Json& check : report["checks"]) {
    if (check["outcome"] == "not run") has_gpu = false;
  }
  int device_checks = 0;
  for (const Json& check : report["checks"]) {
    if (check["section"] != "Device memory") continue;
    ++device_checks;
    EXPECT_EQ(check["outcome"], has_gpu ? "absent" : "not run") << check["name"];
  }
  EXPECT_GT(device_checks, 20);
  const std::string verdict = report["verdict"];
  EXPECT_EQ(verdict.find("device checks not run") != std::string::npos, !has_gpu) << verdict;
}

TEST(Conformance, RefusesBadArgumentsInOneLine) {
  for (const char* arguments : {"", "/nowhere/libnone.so", "--claims v9 x.so", "--what x.so"}) {
    const Judgement run = run_kit(arguments);
    EXPECT_EQ(run.exit_code, 2) << arguments;
    EXPECT_NE(run.text.find("kvx-conformance: "), std::string::npos) << run.text;
  }
  EXPECT_EQ(run_kit(provider("slow_provider") + " --filter nonesuch").exit_code, 2);
}

TEST(Conformance, KnowsOnlyThePublicHeader) {
  const std::string foreign = "(#include \"(?!tools/conformance/)[^\n]*)";
  const std::string own = "(#include <kvx/(?!kvx_abi\\.h)[^\n]*)";
  for (const auto& entry :
       std::filesystem::directory_iterator(KVX_SOURCE_DIR "/tools/conformance")) {
    std::ifstream file(entry.path());
    const std::string text(std::istreambuf_iterator<char>(file), {});
    EXPECT_THAT(find_words(text, foreign), testing::IsEmpty()) << entry.path();
    EXPECT_THAT(find_words(text, own), testing::IsEmpty()) << entry.path();
  }
}

}  // namespace
