// The formats' table and page, from the facts.
#include "tools/kvx/format_pages.hpp"

#include <fmt/format.h>

#include "format/choice_text.hpp"
#include "format/list.hpp"
#include "format/spec.hpp"
#include "kv/recipe.hpp"
#include "tools/kvx/row_drawing.hpp"
#include "tools/kvx/table.hpp"

namespace kvx::tool {
namespace {

using format::Choices;
using format::Facts;
using format::FormatSpec;
using format::list_of;
using format::text_of;

constexpr int kBlockSize = 64;  // dual-scale formats and page-shared scales depend on it
constexpr int kShownHeadDims[] = {64, 128};

// Every format's defaults are a legal spec: make_spec cannot fail here.
FormatSpec default_spec(const Facts& facts) {
  return format::make_spec(facts).value();
}

std::string group_text(const FormatSpec& spec) {
  return spec.has_scale() ? text_of(spec.group_size) : "-";
}

std::string scale_text(const FormatSpec& spec) {
  if (!spec.has_scale()) return "-";
  std::string text = text_of(spec.scale_type);
  if (spec.is_affine()) text += " + zero";
  if (spec.is_dual()) text += " x step";
  if (spec.facts->has_tensor_scale) text += " x f32";
  return text;
}

std::string bits_text(const FormatSpec& spec, int head_dim) {
  return fmt::format("{:.4g}", format::bits_per_value(spec, head_dim, kBlockSize));
}

// has_summaries: with a last column for each format in words, which a Markdown page has no room
// for.
Table sizes_table(bool has_summaries) {
  std::vector<Table::Column> columns = {{"name"},
                                        {"element"},
                                        {"group"},
                                        {"scale"},
                                        {"bits at 64", Align::kRight},
                                        {"bits at 128", Align::kRight},
                                        {"multiple of", Align::kRight}};
  if (has_summaries) columns.push_back({"what it is"});
  Table table(columns);
  for (const Facts* facts : format::kAllFacts) {
    const FormatSpec spec = default_spec(*facts);
    std::vector<std::string> row = {std::string(facts->name),
                                    std::string(facts->element),
                                    group_text(spec),
                                    scale_text(spec),
                                    bits_text(spec, kShownHeadDims[0]),
                                    bits_text(spec, kShownHeadDims[1]),
                                    std::to_string(facts->head_dim_multiple)};
    if (has_summaries) row.push_back(std::string(facts->summary));
    table.add_row(row);
  }
  return table;
}

std::string recommended_text(const Facts& facts) {
  const std::string_view options = kv::recommended_options(facts.id);
  return options.empty() ? "-" : std::string(options);
}

Table choices_table() {
  Table table({{"name"},
               {"groups of"},
               {"scale type"},
               {"scale rule"},
               {"scale source"},
               {"auto stands for"}});
  for (const Facts* facts : format::kAllFacts) {
    if (!default_spec(*facts).has_scale()) continue;
    table.add_row({std::string(facts->name), list_of(facts->group_sizes, ", "),
                   list_of(facts->scale_types, ", "), list_of(facts->scale_rules, ", "),
                   list_of(facts->scale_sources, ", "), recommended_text(*facts)});
  }
  return table;
}

// A list, not a table: the help of an option is too long for a line beside its form.
std::string options_markdown() {
  std::string text;
  for (const kv::OptionHelp& option : kv::recipe_options()) {
    text += fmt::format("- `{}`:\n  {}\n", option.form, option.help);
  }
  return text;
}

std::string format_section(const Facts& facts) {
  constexpr int kHeadDim = kShownHeadDims[0];
  const FormatSpec spec = default_spec(facts);
  std::string text = fmt::format("### {}\n\n{}.\n\n```\n{}```\n\n", facts.name, facts.summary,
                                 draw_row(spec, kHeadDim));
  text += fmt::format("Codes: {} of {} bits, {}.", facts.element, facts.element_bits,
                      name_of(facts.packing));
  if (spec.scale_source == format::ScaleSource::kGiven) {
    text += fmt::format(" The {} scale is given by default and lies outside the row.",
                        name_of(spec.scale_type));
  }
  if (facts.has_tensor_scale) {
    text += " The f32 tensor scale (one a layer and KV head) lies outside the row.";
  }
  if (spec.is_dual()) {
    text += " A head's part of a block, of 64 or 128 tokens:\n\n```\n" +
            draw_dual_block(spec, kHeadDim, kBlockSize) + "```";
  }
  return text + "\n\n";
}

}  // namespace

std::string formats_text(bool color) {
  return sizes_table(true).text(color) +
         "\nbits: per value, the row's scales included, at head_dim 64 and 128. multiple of: what "
         "head_dim must be.\nThe first of several choices is the default:\n\n" +
         choices_table().text(color) +
         "\nA cache is named format[/format][:option,...]; 'kvx formats --help' lists the "
         "options.\n";
}

std::string formats_markdown() {
  std::string text =
      "# Formats\n\n"
      "After this page you can choose a format and its options, and name a cache with them, as in\n"
      "`kvx compare --formats bf16,int8/int4,nvfp4:auto`. `kvx formats --markdown` prints the page "
      "from\nthe facts in `src/format/formats/`; a test keeps the two equal. How a number becomes "
      "these bytes\nis in [numbers.md](numbers.md).\n\n"
      "## Sizes\n\n"
      "Bits per value count the row's own scales, with default options, at head_dim 64 and 128. "
      "head_dim\nmust be a multiple of the last column.\n\n";
  text += sizes_table(false).markdown();
  text +=
      "\n## Choices\n\n"
      "The first of several is the default. `auto` in a recipe stands for the options in the last "
      "column.\n\n";
  text += choices_table().markdown();
  text +=
      "\n## Naming a cache\n\n"
      "One string names a cache everywhere: `format[/format][:option,...]`. K is before the slash "
      "and V\nafter it; one format is for both. Examples: `int8`, `int8/int4`, `int4:auto`,\n"
      "`nvfp4:k.hadamard,search,sink=16,recent=64`. An option applies to both sides where their "
      "formats\ntake it; `k.` or `v.` in front of it limits it to one. `tuned:FILE` names a recipe "
      "that "
      "was tuned\nfor a model, with its tables ([tune-file.md](tune-file.md)).\n\n"
      "A latent cache (MLA) has one row for K and V: V's numbers, then the rotary ones, which are "
      "K's\nalone. One format is for all of them, and `format+format[:option,...]` for the two "
      "parts:\n`nvfp4+bf16:auto`. Options are the first part's. A rotation turns V's numbers "
      "only.\n\n";
  text += options_markdown();
  text +=
      "\n## Rows\n\n"
      "The bytes of one row (one token, one head) at head_dim 64 with default options. A pool may "
      "keep\nthe scales in a region of their own; their bytes are the same there. Numbers of more "
      "than one byte\nare little-endian.\n\n";
  for (const Facts* facts : format::kAllFacts) text += format_section(*facts);
  text.pop_back();  // one line break ends the file
  return text;
}

std::string recipe_help() {
  std::string text =
      "A cache is named by one string everywhere:\n"
      "  format[/format][:option,...]    K and V, or one format for both\n"
      "  format+format[:option,...]      a latent row (MLA): V's numbers, then the rotary ones\n\n"
      "Options (for both sides where their formats take them; k. or v. in front limits one to a "
      "side):\n";
  for (const kv::OptionHelp& option : kv::recipe_options()) {
    text += fmt::format("  {:<28}{}\n", option.form, option.help);
  }
  return text;
}

}  // namespace kvx::tool
