// The registry of shown caches, and the component's view of their metrics.
#include "observe/metrics_server.hpp"

#include <algorithm>
#include <mutex>

#include "observe/open_component.hpp"

namespace kvx::observe {
namespace {

struct Registry {
  struct Entry {
    const kv::KvCache* cache;
    std::string name;
  };
  std::mutex mutex;
  std::vector<Entry> entries;
  int64_t num_shown = 0;  // so far

  bool has(const std::string& name) const {
    return std::ranges::any_of(entries, [&](const Entry& one) { return one.name == name; });
  }
};

// Never destroyed: caches may end after static objects.
Registry& registry() {
  static auto* const all = new Registry;
  return *all;
}

// The families as the component reads them.
class FamilyViews {
 public:
  explicit FamilyViews(const std::vector<MetricFamily>& families) {
    for (const MetricFamily& family : families) {
      std::vector<kvx_observe_sample>& samples = samples_.emplace_back();
      for (const Sample& sample : family.samples) samples.push_back(view_of(sample));
      views_.push_back({family.name.c_str(), family.help.c_str(), static_cast<int32_t>(family.kind),
                        static_cast<int32_t>(samples.size()), samples.data()});
    }
  }
  const std::vector<kvx_observe_family>& views() const { return views_; }

 private:
  kvx_observe_sample view_of(const Sample& sample) {
    std::vector<kvx_observe_label>& labels = labels_.emplace_back();
    for (const auto& [name, value] : sample.labels) labels.push_back({name.c_str(), value.c_str()});
    kvx_observe_sample view{};
    view.labels = labels.data();
    view.num_labels = static_cast<int32_t>(labels.size());
    view.value = sample.value;
    if (!sample.histogram) return view;
    view.counts = sample.histogram->counts.data();
    view.num_bounds = static_cast<int32_t>(sample.histogram->counts.size()) - 1;
    view.first_bound = sample.histogram->first_bound;
    view.sum = sample.histogram->sum;
    return view;
  }

  std::vector<std::vector<kvx_observe_label>> labels_;
  std::vector<std::vector<kvx_observe_sample>> samples_;
  std::vector<kvx_observe_family> views_;
};

// A kvx_observe_collect.
void collect(void (*take)(void* to, const kvx_observe_family* families, int32_t num_families),
             void* to) {
  Metrics metrics;
  {
    Registry& all = registry();
    const std::lock_guard lock(all.mutex);
    for (const Registry::Entry& entry : all.entries) metrics.add(*entry.cache, entry.name);
  }
  const FamilyViews views(metrics.families());
  take(to, views.views().data(), static_cast<int32_t>(views.views().size()));
}

}  // namespace

ShownCache::ShownCache(const kv::KvCache& cache, std::string name) : cache_(&cache) {
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  const int64_t number = all.num_shown++;
  if (name.empty()) name = std::to_string(number);
  if (all.has(name)) name += fmt::format(" ({})", number);
  all.entries.push_back({&cache, std::move(name)});
}

ShownCache::~ShownCache() {
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  std::erase_if(all.entries, [this](const Registry::Entry& one) { return one.cache == cache_; });
}

Result<std::string> metrics_text() {
  KVX_ASSIGN_OR_RETURN(const kvx_observe_functions_t* functions, open_component());
  std::string text;
  const auto append = [](void* to, const char* bytes, uint64_t count) {
    static_cast<std::string*>(to)->append(bytes, count);
  };
  kvx_observe_error error{};
  if (functions->metrics_text(collect, append, &text, &error) != 0) {
    return internal_error("the metrics have no text: {}", error.text);
  }
  return text;
}

Result<std::unique_ptr<MetricsServer>> MetricsServer::create(const std::string& address, int port) {
  if (port < 0 || port > 65535) {
    return invalid_argument("port is {}; expected 0 to 65535", port);
  }
  if (address.empty()) {
    return invalid_argument("address is ''; expected one of this machine's, as 127.0.0.1");
  }
  KVX_ASSIGN_OR_RETURN(const kvx_observe_functions_t* functions, open_component());
  const bool is_ipv6 = address.find(':') != std::string::npos && address.front() != '[';
  const std::string host = is_ipv6 ? "[" + address + "]" : address;
  const std::string endpoint = fmt::format("{}:{}", host, port);
  kvx_observe_error error{};
  kvx_observe_exporter* const exporter =
      functions->exporter_create(endpoint.c_str(), collect, &error);
  if (exporter == nullptr) {
    return invalid_argument(
        "{} cannot be bound for metrics ({}); expected a free port of an "
        "address that this machine has",
        endpoint, error.text);
  }
  return std::unique_ptr<MetricsServer>(new MetricsServer(functions, exporter));
}

MetricsServer::~MetricsServer() {
  functions_->exporter_free(exporter_);
}

}  // namespace kvx::observe
