// The recipe string: what it means, and what it says when it is wrong.
#include "kv/recipe.hpp"

#include <gtest/gtest.h>

#include "format/list.hpp"

namespace kvx::kv::recipe_test {
namespace {

using format::FormatId;

Recipe parsed(std::string_view text) {
  Result<Recipe> recipe = parse_recipe(text);
  if (!recipe.ok()) {
    ADD_FAILURE() << text << ": " << recipe.error().message;
    return {};
  }
  return recipe.value();
}

std::string message_of(std::string_view text) {
  const Result<Recipe> recipe = parse_recipe(text);
  return recipe.ok() ? "accepted" : recipe.error().message;
}

TEST(Recipe, OneFormatIsForBothSides) {
  const Recipe recipe = parsed("int8");
  EXPECT_EQ(recipe.k.spec.facts->id, FormatId::kInt8);
  EXPECT_EQ(recipe.v, recipe.k);
  EXPECT_EQ(recipe.k.spec.group_size, 64);
  EXPECT_FALSE(recipe.has_full_precision_window);
}

TEST(Recipe, KAndVChooseTheirOwnFormat) {
  const Recipe recipe = parsed("int8/int4");
  EXPECT_EQ(recipe.k.spec.facts->id, FormatId::kInt8);
  EXPECT_EQ(recipe.v.spec.facts->id, FormatId::kInt4);
}

TEST(Recipe, EveryFormatIsARecipeAndSoIsItsRecommendation) {
  for (const format::Facts* facts : format::kAllFacts) {
    EXPECT_EQ(parsed(facts->name).k.spec.facts, facts);
    const Recipe recommended = parsed(std::string(facts->name) + ":auto");
    EXPECT_EQ(recommended.has_full_precision_window, !recommended_options(facts->id).empty())
        << facts->name;
  }
}

TEST(Recipe, AnOrderIsTheWholeCaches) {
  EXPECT_EQ(parsed("int8").order, cache::BlockOrder::kHeads);
  EXPECT_EQ(parsed("int8:order=heads").order, cache::BlockOrder::kHeads);
  EXPECT_EQ(parsed("int8/int4:order=turbomind").order, cache::BlockOrder::kTurbomind);
  EXPECT_EQ(message_of("int8:order=nhd"), "order is 'nhd'; expected heads or turbomind");
  EXPECT_EQ(message_of("int8:order"), "order is ''; expected heads or turbomind");
  const auto override = parse_layer_override("0=int8:order=turbomind");
  ASSERT_FALSE(override.ok());
  EXPECT_EQ(override.error().message,
            "override is '0=int8:order=turbomind'; order belongs to the whole cache");
}

TEST(Recipe, AnOptionGoesToTheSidesThatTakeIt) {
  const Recipe recipe = parsed("int8/nvfp4:g32,search,hadamard");
  EXPECT_EQ(recipe.k.spec.group_size, 32);
  EXPECT_EQ(recipe.v.spec.group_size, 16);
  EXPECT_EQ(recipe.k.spec.scale_choice, format::ScaleChoice::kSearch);
  EXPECT_EQ(recipe.v.spec.scale_choice, format::ScaleChoice::kSearch);
  EXPECT_TRUE(recipe.k.hadamard && recipe.v.hadamard);
}

TEST(Recipe, APrefixLimitsAnOptionToOneSide) {
  const Recipe recipe = parsed("int4:k.hadamard,v.g32");
  EXPECT_TRUE(recipe.k.hadamard);
  EXPECT_FALSE(recipe.v.hadamard);
  EXPECT_EQ(recipe.k.spec.group_size, 64);
  EXPECT_EQ(recipe.v.spec.group_size, 32);
}

TEST(Recipe, FullPrecisionWindowComeWithSinkOrRecent) {
  const Recipe recipe = parsed("nvfp4:k.hadamard,search,sink=16,recent=64,full_precision=f16");
  EXPECT_TRUE(recipe.has_full_precision_window);
  EXPECT_EQ(recipe.sink_tokens, 16);
  EXPECT_EQ(recipe.recent_tokens, 64);
  EXPECT_EQ(recipe.full_precision_spec.facts->id, FormatId::kF16);
  EXPECT_EQ(parsed("nvfp4:sink=16").recent_tokens, 0);
  EXPECT_TRUE(parsed("nvfp4:recent=0").has_full_precision_window);  // the open block
}

TEST(Recipe, AutoIsTheRecommendationWrittenOut) {
  for (const format::Facts* facts : format::kAllFacts) {
    const std::string options(recommended_options(facts->id));
    if (options.empty()) continue;
    const Recipe automatic = parsed(std::string(facts->name) + ":auto");
    const Recipe written = parsed(std::string(facts->name) + ":" + options);
    EXPECT_EQ(automatic.k, written.k) << facts->name;
    EXPECT_EQ(automatic.v, written.v) << facts->name;
    EXPECT_EQ(automatic.sink_tokens, written.sink_tokens);
    EXPECT_EQ(automatic.recent_tokens, written.recent_tokens);
  }
}

TEST(Recipe, AutoGivesEachSideItsOwnFormatsOptions) {
  const Recipe recipe = parsed("nvfp4/int8:auto");
  EXPECT_TRUE(recipe.k.hadamard);
  EXPECT_TRUE(recipe.v.hadamard);  // int8 recommends it for V, nvfp4 does not
  EXPECT_EQ(recipe.k.spec.scale_choice, format::ScaleChoice::kSearch);
  EXPECT_EQ(recipe.v.spec.scale_choice, format::ScaleChoice::kAmax);
}

TEST(Recipe, ImmediateTakesTheFullPrecisionWindowAway) {
  EXPECT_FALSE(parsed("nvfp4:auto,immediate").has_full_precision_window);
}

TEST(Recipe, ErrorsNameThePartTheValueAndWhatWasExpected) {
  EXPECT_NE(message_of("int9").find("format is 'int9'; expected one of f32, f16"),
            std::string::npos);
  EXPECT_NE(message_of("").find("format is ''"), std::string::npos);
  EXPECT_NE(message_of("int8/int4/int8").find("expected K or K/V"), std::string::npos);
  EXPECT_NE(message_of("int8:recent=-1").find("recent is '-1'; expected a whole number from 0"),
            std::string::npos);
  EXPECT_NE(message_of("int8:recent=99999999999").find("recent is"), std::string::npos);
  EXPECT_NE(message_of("int8:sink").find("sink is ''"), std::string::npos);
  EXPECT_NE(message_of("int8:full_precision=int4").find("full_precision is 'int4'; expected bf16"),
            std::string::npos);
  EXPECT_NE(message_of("int8:full_precision=f16").find("needs sink=N or recent=N"),
            std::string::npos);
  for (const char* text :
       {"int8:", "int8:g16", "bf16:search", "int8:4over6", "int8_affine:search",
        "int8:hadamard=yes", "int8:scale", "int8:scale=bf16", "int8:immediate=1", "mxfp4:rule=amax",
        "nvfp4:rule=floor", "bf16:source=given", "int8:k.", "int8:auto,,"}) {
    EXPECT_NE(message_of(text).find("takes no such option"), std::string::npos)
        << text << ": " << message_of(text);
  }
  EXPECT_NE(message_of("int8:source=given,search").find("needs computed scales"),
            std::string::npos);
}

TEST(Recipe, OverridesNameLayersOrHeads) {
  const Result<RecipeOverride> layers = parse_layer_override("0-2,5=bf16");
  ASSERT_TRUE(layers.ok());
  ASSERT_EQ(layers.value().where.size(), 4u);
  EXPECT_EQ(layers.value().where[3].layer, 5);
  EXPECT_EQ(layers.value().where[3].head, -1);

  const Result<RecipeOverride> heads = parse_head_override("2:0,2:1=int8:scale=f32");
  ASSERT_TRUE(heads.ok());
  ASSERT_EQ(heads.value().where.size(), 2u);
  EXPECT_EQ(heads.value().where[1].head, 1);
  EXPECT_EQ(heads.value().recipe.k.spec.scale_type, format::ScaleType::kF32);

  EXPECT_FALSE(parse_layer_override("bf16").ok());
  EXPECT_FALSE(parse_layer_override("3-1=bf16").ok());
  EXPECT_FALSE(parse_layer_override("0=nvfp4:auto").ok());
  EXPECT_FALSE(parse_head_override("2=int8").ok());
}

}  // namespace
}  // namespace kvx::kv::recipe_test
