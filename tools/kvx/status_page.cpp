// The status table: a verb works on a level when the level's table has the kernels that the verb
// calls.
#include "tools/kvx/status_page.hpp"

#include <fmt/format.h>

#include "device/cpu_level.hpp"
#include "format/list.hpp"
#include "ops/cpu/kernel_table.hpp"
#include "tools/kvx/info_gpus.hpp"
#include "tools/kvx/table.hpp"

namespace kvx::tool {
namespace {

using ops::cpu::FormatKernels;

struct Verb {
  const char* name;
  bool encodes;
  bool decodes;
};

constexpr Verb kVerbs[] = {
    {"append", true, false},  // dual-scale formats: whole blocks
    {"gather", false, true},
    {"copy_blocks", true, true},  // the same format: bytes; another: decoded and encoded
    {"attend", false, true},
};

bool works(const Verb& verb, const FormatKernels& kernels) {
  return (!verb.encodes || kernels.encode_rows) && (!verb.decodes || kernels.decode_rows);
}

std::string level_names() {
  std::string names;
  for (const device::CpuLevel level : device::kAllCpuLevels) {
    names += (names.empty() ? "" : ", ") + std::string(name_of(level));
  }
  return names;
}

// The CPU levels where the verb works, or "all". Tables are constants: reading one runs none of its
// kernels.
std::string levels_of(const Verb& verb, format::FormatId id) {
  std::string names;
  for (const device::CpuLevel level : device::kAllCpuLevels) {
    const ops::cpu::KernelTable& table = ops::cpu::kernel_table(level);
    const int index = static_cast<int>(id);
    if (index >= table.num_formats || !works(verb, table.formats[index])) continue;
    names += (names.empty() ? "" : ", ") + std::string(name_of(level));
  }
  if (names.empty()) return "none";
  return names == level_names() ? "all" : names;
}

Table status_table() {
  std::vector<Table::Column> columns = {{"format"}};
  for (const Verb& verb : kVerbs) columns.push_back({verb.name});
  columns.push_back({"CUDA"});
  Table table(columns);
  for (const format::Facts* facts : format::kAllFacts) {
    std::vector<std::string> row = {std::string(facts->name)};
    for (const Verb& verb : kVerbs) row.push_back(levels_of(verb, facts->id));
    row.push_back("sm_80 and later");  // every verb visits the one list of formats
    table.add_row(row);
  }
  return table;
}

}  // namespace

std::string status_text(bool color) {
  return status_table().text(color) + fmt::format("\nall: {}\n", level_names());
}

std::string status_markdown() {
  return "# Status\n\n"
         "After this page you know which format works in which verb on which backend.\n"
         "`kvx info --status --markdown` prints it from the kernel tables; a test keeps the two "
         "equal.\n\n"
         "The library chooses a CPU level when it starts; `KVX_CPU` forces one. \"all\" stands "
         "for\n" +
         level_names() +
         ".\nOn CUDA every verb takes every format, where kvx is built with it;\n"
         "[cuda/overview.md](cuda/overview.md) lists what takes the fast kernels.\n"
         "[status-python.md](status-python.md) has the last results of the Python suites and "
         "wheels.\n\n" +
         status_table().markdown() + gpu_markdown();
}

}  // namespace kvx::tool
