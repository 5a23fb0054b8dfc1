// Gates: the text of --fail-if, and which values fail.
#include "quality/gate.hpp"

#include <gmock/gmock.h>

#include <cmath>

namespace kvx::quality {
namespace {

using ::testing::HasSubstr;

std::string refusal(std::string_view text) {
  const auto gates = parse_gates(text);
  return gates.ok() ? "accepted" : gates.error().message;
}

TEST(Gates, AreReadInTheirOrder) {
  const auto gates = parse_gates("ppl>0.2%, kl>0.01,top1<99%,cosine<0.999,saturated>0");
  ASSERT_TRUE(gates.ok()) << gates.error().message;
  ASSERT_EQ(gates.value().size(), 5u);
  EXPECT_EQ(gates.value()[0].figure, Figure::kPerplexityChange);
  EXPECT_EQ(gates.value()[0].limit, 0.2);
  EXPECT_TRUE(gates.value()[0].is_percent());
  EXPECT_EQ(gates.value()[1].text, "kl>0.01");
  EXPECT_EQ(gates.value()[3].figure, Figure::kOutputCosine);
  EXPECT_EQ(name_of(gates.value()[4].figure), "saturated");
}

TEST(Gates, FailBeyondTheirLimitAlone) {
  const Gate kl = parse_gates("kl>0.01").value().front();
  EXPECT_FALSE(kl.fails(0.01));
  EXPECT_TRUE(kl.fails(0.0101));
  const Gate cosine = parse_gates("cosine<0.999").value().front();
  EXPECT_FALSE(cosine.fails(0.999));
  EXPECT_TRUE(cosine.fails(0.998));
}

TEST(Gates, FailWhereTheFigureIsNoNumber) {
  for (const char* text : {"kl>0.01", "cosine<0.5"}) {
    EXPECT_TRUE(parse_gates(text).value().front().fails(std::nan(""))) << text;
  }
}

TEST(Gates, OfLongTextsAreThoseOfStress) {
  const auto gates =
      parse_gates("passkey<90%,needles<50%,entities<50%,nll>0.1,drift>0.01,saturated>0,nonfinite>0",
                  GateUse::kStress);
  ASSERT_TRUE(gates.ok()) << gates.error().message;
  EXPECT_EQ(gates.value()[0].figure, Figure::kPasskey);
  EXPECT_EQ(gates.value()[4].figure, Figure::kDrift);
  EXPECT_TRUE(gates.value()[1].is_percent());
  EXPECT_TRUE(gates.value()[0].fails(89.9));
  EXPECT_FALSE(gates.value()[0].fails(90));
  const auto of_compare = parse_gates("kl>0.01", GateUse::kStress);
  ASSERT_FALSE(of_compare.ok());
  EXPECT_EQ(of_compare.error().message,
            "fail_if has 'kl>0.01'; expected a condition on one of saturated, nonfinite, passkey, "
            "needles, entities, nll, drift, such as drift>0.01");
}

TEST(Gates, WantLogitsOnlyWhereOneLooksAtThem) {
  EXPECT_FALSE(need_logits(parse_gates("cosine<0.9,error>1").value()));
  EXPECT_TRUE(need_logits(parse_gates("kl>1,logit_error>0.1").value()));
}

TEST(Gates, RefuseWhatIsNoCondition) {
  EXPECT_THAT(
      refusal("speed>3"),
      HasSubstr("fail_if has 'speed>3'; expected a condition on one of ppl, kl, top1, cosine, "
                "error, logit_cosine, logit_error, saturated, nonfinite"));
  EXPECT_THAT(refusal("kl<0.01"), HasSubstr("expected '>' behind kl, as in kl>0.01"));
  EXPECT_THAT(refusal("kl"), HasSubstr("expected '>' behind kl"));
  EXPECT_THAT(refusal("ppl>0.2"), HasSubstr("expected a percentage behind '>', as in ppl>0.2%"));
  EXPECT_THAT(refusal("kl>1%"), HasSubstr("expected a number behind '>'"));
  EXPECT_THAT(refusal("kl>"), HasSubstr("expected a number behind '>'"));
  EXPECT_THAT(refusal("kl>0.01x"), HasSubstr("expected a number"));
  EXPECT_THAT(refusal("kl>nan"), HasSubstr("expected a number"));
  EXPECT_THAT(refusal("kl>1,"), HasSubstr("fail_if has ''"));
  EXPECT_THAT(refusal(""), HasSubstr("fail_if has ''"));
  EXPECT_THAT(refusal("kl>1,kl>2"), HasSubstr("fail_if has kl twice"));
}

}  // namespace
}  // namespace kvx::quality
