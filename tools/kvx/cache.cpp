// kvx cache: prints what files of caches hold, checks them, removes what saves have left. What
// wants a model is in cache_of_model.cpp.
#include <cstdio>

#include "tier/file_summary.hpp"
#include "tier/temporary_file.hpp"
#include "tools/kvx/command.hpp"
#include "tools/kvx/stored_recipe.hpp"
#include "tools/kvx/table.hpp"
#include "tools/kvx/terminal.hpp"
#include "tools/kvx/version.hpp"

namespace kvx::tool {
namespace {

Status inspect(const std::string& path) {
  KVX_ASSIGN_OR_RETURN(const auto file, tier::CacheFileReader::open(path));
  const tier::FileIndex& index = file.index();
  fmt::print("{}: version {}, {} bytes\n{}", path, tier::kFileVersion, file.file_bytes(),
             index.fingerprint);
  fmt::print("{} blocks of {} tokens, {} scopes\n", index.blocks.size(), index.block_size,
             index.scopes.size());
  for (int32_t last_block : index.sequences) {
    fmt::print("a sequence of {} tokens\n", tier::num_tokens_of(index, last_block));
  }
  const Result<StoredRecipe> stored = stored_recipe(index.fingerprint);
  if (stored.ok()) {
    fmt::print("loaded with {}\n", stored.value().command_line());
  } else {
    fmt::print("loaded with no option of kvx: {}\n", stored.error().message);
  }
  Table table({{"group", Align::kRight},
               {"kind", Align::kLeft},
               {"block copies", Align::kRight},
               {"bytes", Align::kRight},
               {"stored", Align::kRight}});
  const std::vector<tier::KindSummary> kinds = tier::summarize_kinds(index);
  for (size_t kind = 0; kind < kinds.size(); ++kind) {
    const tier::StoredBlockKind& facts = index.kinds[kind];
    const tier::KindSummary& summary = kinds[kind];
    table.add_row({std::to_string(facts.group),
                   facts.is_full_precision ? "full precision" : "packed",
                   std::to_string(summary.num_block_copies), std::to_string(summary.memory_bytes),
                   std::to_string(summary.stored_bytes)});
  }
  fmt::print("{}", table.text(wants_color(stdout)));
  return {};
}

Status verify(const std::string& path) {
  KVX_ASSIGN_OR_RETURN(auto file, tier::CacheFileReader::open(path));
  KVX_RETURN_IF_ERROR(tier::check_block_copies(file, path));
  int64_t num_block_copies = 0;
  for (const tier::KindSummary& kind : tier::summarize_kinds(file.index())) {
    num_block_copies += kind.num_block_copies;
  }
  fmt::print("{}: {} blocks, {} block copies, all as they were written\n", path,
             file.index().blocks.size(), num_block_copies);
  return {};
}

Status prune(const std::string& path) {
  KVX_ASSIGN_OR_RETURN(const tier::PruneReport report, tier::prune_temporaries(path));
  for (const std::string& removed : report.removed) fmt::print("removed {}\n", removed);
  fmt::print("{} abandoned file{}, {} bytes\n", report.removed.size(),
             report.removed.size() == 1 ? "" : "s", report.bytes);
  return {};
}

void add_prune(Command parent, Action& action) {
  Command command =
      parent.add_subcommand("prune", "Remove what interrupted saves have left in a folder");
  auto path = std::make_shared<std::string>();
  command.add_option("path", *path, "A folder, or a cache file").required();
  command.footer(
      "A save writes FILE.<process>.<number>.tmp and renames it. Files whose process is gone are\n"
      "removed; those of a save that is still running stay.\n");
  command.callback([&action, path] { action = [path] { return prune(*path); }; });
}

void add_file_command(Command parent, Action& action, const char* name, const char* help,
                      Status (*run)(const std::string&)) {
  Command command = parent.add_subcommand(name, help);
  auto path = std::make_shared<std::string>();
  command.add_option("file", *path, "The file").required();
  command.callback([&action, path, run] { action = [path, run] { return run(*path); }; });
}

}  // namespace

void add_cache(Command app, Action& action) {
  Command command = app.add_subcommand(
      "cache", kHasRunner ? "Save a prompt's cache, go on from it, look into it, check it"
                          : "Look into a cache's file, check it");
  command.require_subcommand();
  std::string examples = "Examples:\n";
  if constexpr (kHasRunner) {
    add_cache_of_model(command, action);
    examples +=
        "  kvx cache save -m model.gguf --cache nvfp4:auto -f book.txt -o book.kvx\n"
        "  kvx cache load -m model.gguf book.kvx -n 50\n"
        "  kvx cache load -m model.gguf --cache int8 --transcode book.kvx\n";
  }
  add_file_command(command, action, "inspect",
                   "Print what a cache file holds and the options that load it", inspect);
  add_file_command(command, action, "verify", "Check every block of a cache file", verify);
  add_prune(command, action);
  command.footer(examples + "  kvx cache inspect book.kvx\n  kvx cache prune .\n");
}

}  // namespace kvx::tool
