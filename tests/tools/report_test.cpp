// The report as table, JSON and page.
#include "tools/kvx/report/report.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include "tools/kvx/embedded.hpp"

namespace kvx::tool::report_test {
namespace {

using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;

CompareReport two_caches() {
  CompareReport report;
  report.version = "1.2.3";
  report.model = "model.gguf";
  report.text = "text.txt";
  report.cpu_level = "avx2";
  report.products = "f32";
  report.threads = 2;
  report.context = 1024;
  report.num_windows = 4;
  report.num_scored_tokens = 2044;
  CacheReport base;
  base.name = "bf16";
  base.bits_per_value = 16;
  base.bytes_per_token = 23040;
  base.tokens_per_gib = 46603;
  base.perplexity = {12, 0.5};
  base.change_percent = {0, 0};
  base.same_top_percent = {100, 0};
  base.layers = {{1, 0}, {1, 0}};
  CacheReport other = base;
  other.name = "nvfp4:auto";
  other.bits_per_value = 4.5;
  other.change_percent = {0.9, 0.1};
  other.kl = {0.0072, 0.0005};
  other.layers = {{0.999, 0.05}, {0.99, 0.15}};
  report.caches = {base, other};
  return report;
}

TEST(Report, ShowsTheWorstLayer) {
  const CompareReport report = two_caches();
  EXPECT_EQ(worst_layer(report.caches[1]).relative_error, 0.15);
  EXPECT_THAT(
      report_table(report, false),
      ContainsRegex("nvfp4:auto +4\\.50 .*\\+0\\.90 \\+- 0\\.10 +0\\.00720.*0\\.99000 +0\\.1500"));
}

TEST(Speed, IsTheMedianOfRepeatsWithItsExtremes) {
  const auto speed = speed_of({30, 10, 20});
  ASSERT_TRUE(speed.has_value());
  EXPECT_EQ(speed->median, 20);
  EXPECT_EQ(speed->lowest, 10);
  EXPECT_EQ(speed->highest, 30);
  EXPECT_EQ(speed->num_repeats, 3);
}

TEST(Speed, IsLeftOutWithoutRepeats) {
  EXPECT_FALSE(speed_of({10, 20}).has_value());
  EXPECT_THAT(report_table(two_caches(), false), ContainsRegex("bf16 .* - +-\n"));
  const auto json = nlohmann::json::parse(report_json(two_caches()));
  EXPECT_TRUE(json["caches"][0]["decode_tokens_per_second"].is_null());
}

TEST(Report, ShowsSpeedsWithTheirSpread) {
  CompareReport report = two_caches();
  report.caches[0].prefill = report.caches[1].prefill = Speed{512, 498, 530, 4};
  EXPECT_THAT(report_table(report, false), HasSubstr("512 (498-530)"));
  EXPECT_THAT(report_table(report, false), HasSubstr("prefill of 4, decode had too few"));
}

TEST(Headline, NamesTheSmallestCacheThatCostsLittle) {
  CompareReport report = two_caches();
  report.caches[1].bytes_per_token = 6480;
  CacheReport larger = report.caches[1];
  larger.name = "int8";
  larger.bytes_per_token = 11700;
  larger.change_percent = {0.1, 0.1};
  CacheReport worse = report.caches[1];
  worse.name = "int4";
  worse.bytes_per_token = 6000;
  worse.change_percent = {7, 0.5};
  report.caches.push_back(larger);
  report.caches.push_back(worse);
  EXPECT_EQ(headline(report),
            "nvfp4:auto is the smallest cache here that keeps the perplexity within 2 % of bf16: a "
            "token takes 6480 bytes instead of 23040, 3.6 times fewer, and perplexity changes by "
            "+0.90 +- 0.10 %.");
}

TEST(Headline, SaysWhenNoCacheIsGoodEnough) {
  CompareReport report = two_caches();
  report.caches[1].change_percent = {7, 0.5};
  EXPECT_EQ(headline(report),
            "No cache here keeps the perplexity within 2 % of bf16: nvfp4:auto is the nearest with "
            "+7.00 +- 0.50 %.");
  report.caches.pop_back();
  EXPECT_EQ(headline(report), "No cache was compared with bf16.");
}

TEST(Report, ShowsNoErrorThatItDoesNotKnow) {
  CompareReport report = two_caches();
  report.caches[1].change_percent.standard_error = std::numeric_limits<double>::quiet_NaN();
  EXPECT_THAT(report_table(report, false), ContainsRegex("\\+0\\.90 +0\\.00720"));
}

TEST(Report, TellsOfInputsThatWereLost) {
  CompareReport report = two_caches();
  EXPECT_THAT(report_table(report, false), Not(HasSubstr("not finite")));
  report.caches[1].nonfinite_inputs = 3;
  EXPECT_THAT(report_table(report, false), HasSubstr("nvfp4:auto: 3 inputs were not finite"));
}

// Four heads, the worst of them 1:0, and some that clip.
CompareReport report_with_heads() {
  CompareReport report = two_caches();
  for (CacheReport& cache : report.caches) {
    cache.num_kv_heads = 2;
    cache.heads = {{1, 0}, {1, 0}, {1, 0}, {1, 0}};
    cache.logit_heads = cache.heads;
    cache.saturation = {{{{0, 0}, {0, 0}}, {{0, 0}, {0, 0}}}, {{{0, 0}, {0, 0}}, {{0, 0}, {0, 0}}}};
  }
  report.caches[1].heads[2] = {0.98, 0.2};
  report.caches[1].logit_heads[1] = {0.97, 0.3};
  report.caches[1].saturation[1].v[1].saturated = 5;
  report.caches[1].saturation[0].k[0].saturated = 2;
  return report;
}

std::vector<std::string> failures(CompareReport report, std::string_view gates) {
  report.gates = quality::parse_gates(gates).value();
  std::vector<std::string> texts;
  for (const GateFailure& failure : failures_of(report)) texts.push_back(failure.text());
  return texts;
}

TEST(Gates, PassWhereEveryFigureIsWithinItsLimit) {
  EXPECT_TRUE(failures(report_with_heads(),
                       "ppl>1%,kl>0.01,top1<99%,cosine<0.9,error>0.25,logit_cosine<0.9,"
                       "logit_error>0.5,saturated>7,nonfinite>0")
                  .empty());
}

TEST(Gates, NameTheCacheAndTheWorstLayerAndHead) {
  const CompareReport report = report_with_heads();
  EXPECT_THAT(
      failures(report, "ppl>0.5%,kl>0.01"),
      ::testing::ElementsAre("nvfp4:auto: ppl is 0.9 %, which --fail-if ppl>0.5% does not allow"));
  EXPECT_THAT(failures(report, "cosine<0.999")[0],
              HasSubstr("nvfp4:auto: cosine is 0.98 in layer 1, KV head 0"));
  EXPECT_THAT(failures(report, "error>0.1")[0], HasSubstr("0.2 in layer 1, KV head 0"));
  EXPECT_THAT(failures(report, "logit_cosine<0.999")[0], HasSubstr("0.97 in layer 0, KV head 1"));
  EXPECT_THAT(failures(report, "logit_error>0.1")[0], HasSubstr("0.3 in layer 0, KV head 1"));
  EXPECT_THAT(failures(report, "saturated>6")[0], HasSubstr("7, most in layer 1, KV head 1"));
}

TEST(Gates, FailOnWhatWasNotMeasuredAndOnWhatIsNoNumber) {
  CompareReport report = report_with_heads();
  for (CacheReport& cache : report.caches) {
    cache.logit_heads.clear();
  }
  report.caches[1].heads[3].relative_error = std::nan("");
  EXPECT_EQ(failures(report, "logit_error>9,logit_cosine<0.1").size(), 2u);
  EXPECT_THAT(failures(report, "error>9")[0], HasSubstr("error is nan in layer 1, KV head 1"));
}

TEST(Report, ShowsLogitsAndClippedInputsWhereThereAreAny) {
  EXPECT_THAT(report_table(two_caches(), false), Not(HasSubstr("logit")));
  const CompareReport report = report_with_heads();
  EXPECT_THAT(report_table(report, false), ContainsRegex("0\\.97000 +0\\.3000 +0:1\n"));
  EXPECT_THAT(report_table(report, false),
              HasSubstr("nvfp4:auto: 7 inputs were clipped by a static scale, most in 1:1\n"));
}

TEST(Report, IsJsonWithHeadsGatesAndFailures) {
  CompareReport report = report_with_heads();
  report.gates = quality::parse_gates("kl>1,cosine<0.999").value();
  const auto json = nlohmann::json::parse(report_json(report));
  EXPECT_EQ(json["caches"][1]["attention_by_head"][1][0]["relative_error"], 0.2);
  EXPECT_EQ(json["caches"][1]["logits_by_head"][0][1]["cosine_similarity"], 0.97);
  EXPECT_EQ(json["caches"][1]["saturated_inputs"], 7);
  EXPECT_EQ(json["caches"][1]["saturated_by_head"][1]["v"][1], 5);
  EXPECT_EQ(json["fail_if"].size(), 2u);
  ASSERT_EQ(json["failures"].size(), 1u);
  EXPECT_EQ(json["failures"][0]["figure"], "cosine");
  EXPECT_EQ(json["failures"][0]["layer"], 1);
  EXPECT_EQ(json["failures"][0]["kv_head"], 0);
  EXPECT_TRUE(
      nlohmann::json::parse(report_json(two_caches()))["caches"][1]["logits_by_head"].is_null());
}

TEST(Report, IsJsonWithNullForWhatIsNoNumber) {
  CompareReport report = two_caches();
  report.caches[1].perplexity = {std::numeric_limits<double>::quiet_NaN(), 1};
  const auto json = nlohmann::json::parse(report_json(report));
  EXPECT_EQ(json["context"], 1024);
  EXPECT_EQ(json["caches"][1]["name"], "nvfp4:auto");
  EXPECT_EQ(json["caches"][1]["kl"]["value"], 0.0072);
  EXPECT_TRUE(json["caches"][1]["perplexity"]["value"].is_null());
  EXPECT_EQ(json["caches"][1]["attention_by_layer"][1]["relative_error"], 0.15);
}

TEST(Report, SurvivesAFileNameThatIsNoUtf8) {
  CompareReport report = two_caches();
  report.text = "caf\xE9.txt";
  EXPECT_TRUE(nlohmann::json::accept(report_json(report)));
}

TEST(Report, IsAPageThatHoldsItsDataAndItsCharts) {
  const std::string page = report_html(two_caches());
  EXPECT_THAT(page, HasSubstr("\"name\": \"nvfp4:auto\""));
  EXPECT_THAT(page, HasSubstr("Chart.js v3"));
  EXPECT_THAT(page, Not(HasSubstr("{{REPORT_JSON}}")));
  EXPECT_THAT(page, Not(HasSubstr("{{CHART_JS}}")));
}

TEST(Report, IsAPageThatBeginsWithItsHeadline) {
  const std::string page = report_html(two_caches());
  EXPECT_THAT(page, HasSubstr("<p class=\"headline\" id=\"headline\">"));
  EXPECT_THAT(page, HasSubstr("\"headline\": \"nvfp4:auto is the smallest cache here"));
}

TEST(Report, IsAPageWithLinearAxes) {
  EXPECT_THAT(std::string(report_page()), Not(HasSubstr("logarithmic")));
}

TEST(Report, IsAPageWhoseTableScrolls) {
  const std::string page(report_page());
  const size_t scroll = page.find("<div class=\"scroll\"");
  ASSERT_NE(scroll, std::string::npos);
  EXPECT_EQ(page.find("<table"), page.find("<table", scroll));
  EXPECT_THAT(std::string(page_css()), HasSubstr(".scroll { overflow-x: auto"));
}

// Two sets, one a background, whose colours differ by a fifth of a channel's range at least.
TEST(Report, IsAPageWithDistinctColours) {
  const std::string page(report_page());
  for (const char* background : {"light: [", "dark: ["}) {
    const size_t begin = page.find(background);
    ASSERT_NE(begin, std::string::npos);
    std::vector<std::array<int, 3>> colours;
    const std::string set = page.substr(begin, page.find(']', begin) - begin);
    for (size_t at = set.find('#'); at != std::string::npos; at = set.find('#', at + 1)) {
      const auto channel = [&](size_t i) { return std::stoi(set.substr(at + i, 2), nullptr, 16); };
      colours.push_back({channel(1), channel(3), channel(5)});
    }
    ASSERT_EQ(colours.size(), 8u);
    for (size_t a = 0; a < colours.size(); ++a) {
      for (size_t b = 0; b < a; ++b) {
        double squares = 0;
        for (int c = 0; c < 3; ++c) squares += std::pow(colours[a][c] - colours[b][c], 2);
        EXPECT_GT(std::sqrt(squares), 51) << background << a << " and " << b;
      }
    }
  }
}

TEST(Report, IsAPageThatLoadsNothing) {
  const std::string page = report_html(two_caches());
  EXPECT_THAT(page, Not(ContainsRegex("<(script|link|img|iframe)[^>]*(src|href)=")));
  EXPECT_THAT(page, Not(HasSubstr("@import")));
}

TEST(Report, CannotBeBrokenOutOfByAName) {
  CompareReport report = two_caches();
  report.text = "</script><b>";
  EXPECT_THAT(report_html(report), Not(HasSubstr("</script><b>")));
  report.text = "<!--<script>";
  EXPECT_THAT(report_html(report), Not(HasSubstr("<!--<script>")));
}

}  // namespace
}  // namespace kvx::tool::report_test
