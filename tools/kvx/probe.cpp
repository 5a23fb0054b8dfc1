// kvx probe: what a cache has stored of one token, byte by byte.
#include <cstdio>

#include "device/cuda_async.hpp"
#include "device/cuda_caller.hpp"
#include "engines/turbomind/probe.hpp"
#include "format/scale.hpp"
#include "tools/kvx/command.hpp"
#include "tools/kvx/session.hpp"

namespace kvx::tool {
namespace {

namespace turbomind = engines::turbomind;

struct ProbeOptions {
  SessionOptions session;
  bool is_turbomind = false;
  std::string prompt = "The five bytes of a probe.";
  int layer = 0;
  int head = 0;
  int token = 0;
};

// A copy on the host of the blocks that hold the sequence, in both of TurboMind's pools.
struct FetchedBlocks {
  std::vector<std::vector<uint8_t>> data;
  std::vector<std::vector<uint8_t>> scales;
};

Result<FetchedBlocks> fetch_blocks(const Session& session) {
  const kv::KvCache& cache = session.attention->cache();
  const kv::CacheStorage& storage = cache.table().storage;
  if (storage.groups.size() != 1) {
    return unsupported("the model has layers with {} sliding windows; the probe reads one group",
                       storage.groups.size());
  }
  KVX_RETURN_IF_ERROR(cache.synchronize());
  const cache::BlockLayout& layout = storage.groups.front().packed;
  const cache::BlockTable& table = cache.table().sequences[session.attention->sequence()].table(0);
  FetchedBlocks blocks;
  for (int64_t b = 0; b < table.size(); ++b) {
    const std::span<uint8_t> bytes = storage.block_bytes(storage.packed_class(0), table[b]);
    std::vector<uint8_t> copy(bytes.size());
    if (storage.config.cuda) {
      KVX_RETURN_IF_ERROR(device::cuda_copy(copy.data(), bytes.data(), std::ssize(copy)));
    } else {
      std::ranges::copy(bytes, copy.begin());
    }
    const auto begin = copy.begin() + layout.scale_block_offset;
    blocks.scales.emplace_back(begin, begin + layout.scale_block_bytes);
    copy.resize(static_cast<size_t>(layout.scale_block_offset));
    blocks.data.push_back(std::move(copy));
  }
  return blocks;
}

Result<turbomind::Fp4KvProbeResult> probe(const ProbeOptions& options, const Session& session) {
  const kv::CacheStorage& storage = session.attention->cache().table().storage;
  const kv::CacheGeometry& geometry = storage.config.geometry;
  const auto mode = storage.config.recipe.k.spec.facts->id == format::FormatId::kNvfp4
                        ? turbomind::KvCacheMode::kFp4Nv
                        : turbomind::KvCacheMode::kFp4Mx;
  KVX_ASSIGN_OR_RETURN(
      const turbomind::PoolLayout layout,
      turbomind::make_pool_layout({mode, DType::kF16, geometry.num_layers, geometry.num_kv_heads,
                                   geometry.k_head_dim, storage.config.block_size}));
  const int64_t num_tokens = session.attention->num_tokens();
  if (options.token >= num_tokens) {
    return invalid_argument("token is {}; the prompt has {} tokens", options.token, num_tokens);
  }
  KVX_ASSIGN_OR_RETURN(FetchedBlocks blocks, fetch_blocks(session));
  std::vector<uint8_t*> data;
  std::vector<uint8_t*> scales;
  for (size_t b = 0; b < blocks.data.size(); ++b) {
    data.push_back(blocks.data[b].data());
    scales.push_back(blocks.scales[b].data());
  }
  return turbomind::fp4_kv_probe_host(layout, {data, scales}, options.layer, options.head,
                                      options.token);
}

Status run_probe(const ProbeOptions& options) {
  if (!options.is_turbomind) {
    return invalid_argument("turbomind is not given; it is the only cache that is probed");
  }
  ProbeOptions kept = options;
  if (kept.session.quant_policy < 0) kept.session.quant_policy = 16;
  if ((kept.session.quant_policy & 16) == 0) {
    return invalid_argument("quant-policy is {}; the probe reads FP4, which has bit 16",
                            kept.session.quant_policy);
  }
  KVX_ASSIGN_OR_RETURN(Session session, open_session(kept.session, false));
  KVX_ASSIGN_OR_RETURN(const std::vector<int> prompt, prompt_tokens(session, kept.prompt, true));
  KVX_RETURN_IF_ERROR(session.attention->reset());
  runner::GenerateOptions one_token;
  one_token.max_tokens = 1;
  KVX_ASSIGN_OR_RETURN(
      const auto ignored,
      runner::generate(*session.loaded.model, session.loaded.tokenizer, *session.attention, prompt,
                       one_token, [](std::string_view) { return true; }));
  (void)ignored;
  KVX_ASSIGN_OR_RETURN(const turbomind::Fp4KvProbeResult found, probe(kept, session));
  const format::FormatSpec& spec = session.attention->cache().config().recipe.k.spec;
  const auto line = [&spec](std::string_view name, uint8_t byte) {
    fmt::print("{:<9} 0x{:02x}  {:g}\n", name, byte, format::decode_scale(spec.scale_type, {byte}));
  };
  fmt::print("{}, layer {}, KV head {}, token {}\n",
             session.attention->cache().config().recipe.text, kept.layer, kept.head, kept.token);
  line("k_scale0", found.k_scale0);
  line("v_scale0", found.v_scale0);
  line("k_scale1", found.k_scale1);
  line("v_scale1", found.v_scale1);
  fmt::print("kv_byte0  0x{:02x}  codes {} and {}\n", found.kv_byte0, found.kv_byte0 & 15,
             found.kv_byte0 >> 4);
  return {};
}

}  // namespace

void add_probe(Command app, Action& action) {
  Command command = app.add_subcommand("probe", "Show what a cache has stored of one token");
  auto o = std::make_shared<ProbeOptions>();
  command.add_flag("--turbomind", o->is_turbomind,
                   "TurboMind's FP4 blocks: the first scales and codes at the addresses that its "
                   "kernels read");
  add_session_options(command, o->session);
  command.add_option("-p,--prompt", o->prompt, "The text whose tokens are stored")
      .capture_default_str();
  command.add_option("--layer", o->layer, "The layer, from 0").whole_number(0, 1 << 20);
  command.add_option("--head", o->head, "The KV head, from 0").whole_number(0, 1 << 20);
  command.add_option("--token", o->token, "The token of the prompt, from 0")
      .whole_number(0, 1 << 24);
  command.footer(
      "Examples:\n"
      "  kvx probe --turbomind -m model.gguf\n"
      "  kvx probe --turbomind -m model.gguf --fp4-format nv --quant-policy 16 --token 65\n");
  command.callback([&action, o] { action = [o] { return run_probe(*o); }; });
}

}  // namespace kvx::tool
