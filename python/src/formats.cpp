// Formats, their facts and recipe strings, as plain dictionaries.
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include "format/choice_text.hpp"
#include "format/list.hpp"
#include "kv/recipe.hpp"
#include "python/src/bindings.hpp"
#include "python/src/errors.hpp"
#include "tune/tuned_recipe.hpp"

namespace kvx::python {
namespace {

namespace nb = nanobind;

template <class T>
std::vector<std::string> words_of(const format::Choices<T>& choices) {
  std::vector<std::string> words;
  for (int i = 0; i < choices.count; ++i) words.push_back(format::text_of(choices.values[i]));
  return words;
}

nb::dict facts_dict(const format::Facts& facts) {
  nb::dict dict;
  dict["name"] = facts.name;
  dict["element"] = facts.element;
  dict["element_bits"] = facts.element_bits;
  dict["group_sizes"] = words_of(facts.group_sizes);
  dict["scale_types"] = words_of(facts.scale_types);
  dict["scale_rules"] = words_of(facts.scale_rules);
  dict["scale_sources"] = words_of(facts.scale_sources);
  dict["has_tensor_scale"] = facts.has_tensor_scale;
  dict["packing"] = name_of(facts.packing);
  dict["head_dim_multiple"] = facts.head_dim_multiple;
  dict["recommended_options"] = kv::recommended_options(facts.id);
  dict["summary"] = facts.summary;
  return dict;
}

nb::dict side_dict(const kv::SideRecipe& side) {
  nb::dict dict;
  dict["format"] = side.spec.facts->name;
  dict["group_size"] = format::text_of(side.spec.group_size);
  dict["scale_type"] = name_of(side.spec.scale_type);
  dict["scale_rule"] = name_of(side.spec.scale_rule);
  dict["scale_source"] = name_of(side.spec.scale_source);
  dict["scale_choice"] = name_of(side.spec.scale_choice);
  dict["hadamard"] = side.hadamard;
  return dict;
}

nb::list formats() {
  nb::list all;
  for (const format::Facts* facts : format::kAllFacts) all.append(facts_dict(*facts));
  return all;
}

nb::dict parse_recipe(std::string_view text) {
  const auto recipe = value_of(tune::read_recipe(text)).recipe;
  nb::dict dict;
  dict["text"] = recipe.text;
  dict["k"] = side_dict(recipe.k);
  dict["v"] = side_dict(recipe.v);
  dict["rotary_format"] = recipe.rotary ? nb::cast(recipe.rotary->facts->name) : nb::none();
  dict["sink_tokens"] = recipe.has_full_precision_window ? recipe.sink_tokens : 0;
  dict["recent_tokens"] = recipe.has_full_precision_window ? recipe.recent_tokens : 0;
  dict["full_precision_format"] = recipe.has_full_precision_window
                                      ? nb::cast(recipe.full_precision_spec.facts->name)
                                      : nb::none();
  return dict;
}

nb::list recipe_options() {
  nb::list all;
  for (const kv::OptionHelp& option : kv::recipe_options()) {
    all.append(nb::make_tuple(option.form, option.help));
  }
  return all;
}

}  // namespace

void bind_formats(nb::module_& module) {
  module.def("formats", &formats);
  module.def("parse_recipe", &parse_recipe, nb::arg("text"));
  module.def(
      "check_tuned_model",
      [](std::string_view recipe_text, std::string_view name, std::string_view architecture,
         int num_layers) {
        const auto recipe = value_of(tune::read_recipe(recipe_text));
        throw_if_error(tune::check_model(recipe, name, architecture));
        if (!recipe.file || recipe.num_layers == num_layers) return;
        throw CoreError(invalid_argument("the tuned recipe has num_layers {}; the model has {}",
                                         recipe.num_layers, num_layers));
      },
      nb::arg("recipe"), nb::arg("name"), nb::arg("architecture"), nb::arg("num_layers"));
  module.def("recipe_options", &recipe_options);
}

}  // namespace kvx::python
