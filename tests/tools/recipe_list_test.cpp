// Lists of recipes: where one ends and the next begins.
#include "tools/kvx/recipe_list.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace kvx::tool {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::vector<std::string> names_of(std::string_view list) {
  std::vector<std::string> names;
  const auto recipes = parse_recipe_list(list);
  if (!recipes.ok()) return {"error: " + recipes.error().message};
  for (const kv::Recipe& recipe : recipes.value()) names.push_back(recipe.text);
  return names;
}

TEST(RecipeList, SeparatesPlainFormatsAtCommas) {
  EXPECT_THAT(names_of("bf16,int8,int8/int4"), ElementsAre("bf16", "int8", "int8/int4"));
}

TEST(RecipeList, KeepsARecipesOptionsWithIt) {
  EXPECT_THAT(names_of("nvfp4:hadamard,search,sink=16,int8,int4:g32,recent=64"),
              ElementsAre("nvfp4:hadamard,search,sink=16", "int8", "int4:g32,recent=64"));
}

TEST(RecipeList, TakesAFullPrecisionWindowFormatAsAnOption) {
  EXPECT_THAT(names_of("int8:sink=16,full_precision=f16,bf16"),
              ElementsAre("int8:sink=16,full_precision=f16", "bf16"));
}

TEST(RecipeList, BeginsATunedRecipeAtItsWord) {
  EXPECT_THAT(names_of("int8:sink=4,tuned:/nowhere,recent=8,bf16"),
              ElementsAre(HasSubstr("error: '/nowhere' cannot be read")));
}

TEST(RecipeList, DropsBlanksAroundCommas) {
  EXPECT_THAT(names_of(" int8, int4:sink=16 ,\trecent=64, bf16 "),
              ElementsAre("int8", "int4:sink=16,recent=64", "bf16"));
  EXPECT_THAT(names_of("int8, "), ElementsAre(HasSubstr("error: format is ''")));
}

TEST(RecipeList, NamesAFormatThatItDoesNotKnow) {
  EXPECT_THAT(names_of("bf16,int9"), ElementsAre(HasSubstr("error: format is 'int9'")));
  EXPECT_THAT(names_of(""), ElementsAre(HasSubstr("error: format is ''")));
}

TEST(RecipeList, NamesAnOptionThatNoFormatTakes) {
  EXPECT_THAT(names_of("nvfp4:hadamard,serach"), ElementsAre(HasSubstr("'serach'")));
}

TEST(RecipeList, RefusesARecipeTwice) {
  EXPECT_THAT(names_of("int8,bf16,int8"), ElementsAre(HasSubstr("'int8' twice")));
}

TEST(Overrides, AreReadInOrderLayersFirst) {
  const auto overrides = parse_overrides({.layers = {"0,1=bf16"}, .heads = {"2:0=int8"}});
  ASSERT_TRUE(overrides.ok());
  ASSERT_EQ(overrides.value().size(), 2u);
  EXPECT_EQ(overrides.value()[0].where.size(), 2u);
  EXPECT_EQ(overrides.value()[1].where[0].head, 0);
}

TEST(Overrides, NameWhatIsWrong) {
  const auto overrides = parse_overrides({.layers = {"zero=bf16"}, .heads = {}});
  ASSERT_FALSE(overrides.ok());
  EXPECT_THAT(overrides.error().message, HasSubstr("'zero'"));
}

}  // namespace
}  // namespace kvx::tool
