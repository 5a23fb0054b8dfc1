// kvx info: what this machine offers, what this build holds, and what works on which backend.
#include <cstdio>
#include <thread>

#include "device/cpu_level.hpp"
#include "tools/kvx/command.hpp"
#include "tools/kvx/info_gpus.hpp"
#include "tools/kvx/status_page.hpp"
#include "tools/kvx/terminal.hpp"
#include "tools/kvx/version.hpp"

namespace kvx::tool {
namespace {

struct InfoOptions {
  bool status = false;
  bool markdown = false;
};

std::string supported_levels() {
  std::string names;
  for (const device::CpuLevel level : device::kAllCpuLevels) {
    if (!device::supports(level)) continue;
    names += (names.empty() ? "" : ", ") + std::string(name_of(level));
  }
  return names;
}

Status print_info() {
  KVX_ASSIGN_OR_RETURN(const device::CpuLevel level, device::choose_cpu_level());
  fmt::print("version    kvx {}\n", kVersion);
  fmt::print("build      {}, {}, {}\n", kBuildType, kCompiler, kSystem);
  fmt::print("cpu level  {} (this machine runs {}; KVX_CPU forces one)\n", name_of(level),
             supported_levels());
  fmt::print("threads    {}\n", std::thread::hardware_concurrency());
  fmt::print("cuda       {}\n", kCuda);
  fmt::print("gpus       {}", gpu_lines(kCudaTargets, "           "));
  return {};
}

Status print_status(bool markdown) {
  fmt::print("{}", markdown ? status_markdown() : status_text(wants_color(stdout)));
  return {};
}

}  // namespace

void add_info(Command app, Action& action) {
  Command command = app.add_subcommand("info", "Show the CPU level, CUDA and the build");
  auto options = std::make_shared<InfoOptions>();
  Option status = command.add_flag("--status", options->status, "Show which format works where");
  command.add_flag("--markdown", options->markdown, "With --status: print the page docs/status.md")
      .needs(status);
  command.footer(
      "Examples:\n"
      "  kvx info\n"
      "  KVX_CPU=scalar kvx info\n"
      "  kvx info --status --markdown > docs/status.md\n");
  command.callback([&action, options] {
    action = [options] { return options->status ? print_status(options->markdown) : print_info(); };
  });
}

}  // namespace kvx::tool
