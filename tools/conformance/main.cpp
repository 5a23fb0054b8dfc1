// kvx-conformance: is this shared library a provider of the KVX C ABI? Exit codes: 0 it conforms,
// 1 it does not, 2 it could not be checked.
#include <CLI/CLI.hpp>
#include <cstdio>

#include "tools/conformance/report.hpp"
#include "tools/conformance/system.hpp"

namespace kvx::conformance {
namespace {

constexpr int kConforms = 0;
constexpr int kDoesNotConform = 1;
constexpr int kNotJudged = 2;

struct Options {
  std::string library;
  std::string claims;  // empty: queried where the library has that function
  std::string filter;
  bool is_json = false;
};

bool is_wanted(const Check& check, const std::string& filter) {
  return (title_of(check.section) + (": " + check.name)).find(filter) != std::string::npos;
}

int judge(const Options& options) {
  const Provider provider = load_provider(options.library);
  Report report = {.library = options.library, .claims_from = options.claims};
  if (report.claims_from.empty()) {
    report.claims_from = provider.query_features != nullptr ? "queried" : "v1.1";
  }
  const Features claims =
      report.claims_from == "v1.1" ? claims_of_v1_1() : claims_queried(provider);
  const bool gpu = has_gpu();
  const std::vector<Check> checks = all_checks();
  Features judged;
  for (size_t number = 0; number < checks.size(); ++number) {
    if (!is_wanted(checks[number], options.filter)) continue;
    report.results.push_back(run_check(checks, number, provider, claims, gpu));
    judged.add(checks[number].needs);
  }
  if (report.results.empty()) {
    throw std::runtime_error(fmt::format("no check has '{}' in its name", options.filter));
  }
  if (options.filter.empty()) report.unjudged = (claims - judged).names();
  fmt::print("{}", options.is_json ? json_of(report) : text_of(report));
  if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0) {
    fmt::print(stderr, "kvx-conformance: stdout cannot be written\n");
    return kNotJudged;
  }
  return report.conforms() ? kConforms : kDoesNotConform;
}

int run(int argc, char** argv) {
  Options options;
  CLI::App app("Judges a provider of the KVX C ABI by what its functions do to memory.",
               "kvx-conformance");
  app.add_option("library", options.library, "The provider's shared library")->required();
  app.add_option(
         "--claims", options.claims,
         "The features to check: v1.1 (those that the specification requires), queried (those of "
         "kvx_query_features); default: queried where the library has that function")
      ->check(CLI::IsMember({"v1.1", "queried"}));
  app.add_option("--filter", options.filter, "Only checks with this in their section or name");
  app.add_flag("--json", options.is_json, "The report as JSON");
  app.footer("Exit codes: 0 it conforms, 1 it does not, 2 it could not be judged.");
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& help) {
    return app.exit(help);
  } catch (const CLI::ParseError& error) {
    fmt::print(stderr, "kvx-conformance: {}\n", error.what());
    return kNotJudged;
  }
  try {
    if (const auto task = task_of_this_process()) do_task(*task, options.library);
    return judge(options);
  } catch (const std::exception& error) {
    fmt::print(stderr, "kvx-conformance: {}: {}\n", options.library, error.what());
    return kNotJudged;
  }
}

}  // namespace
}  // namespace kvx::conformance

int main(int argc, char** argv) {
  return kvx::conformance::run(argc, argv);
}
