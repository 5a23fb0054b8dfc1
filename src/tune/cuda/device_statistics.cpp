// DeviceStatistics: sums stay on the device until somebody reads them; the host counts rows alone.
#include "tune/cuda/device_statistics.hpp"

#include <algorithm>

#include "device/cuda_caller.hpp"

namespace kvx::tune {
namespace {

using gpu::kNumSplits;

constexpr const char* kSideNames[] = {"k", "v", "q"};
constexpr int kMostTurnedRows = 8192;  // whose angles are computed at a time

template <class T>
Status download(const T* from, std::vector<T>& to) {
  return device::cuda_copy(to.data(), from, std::ssize(to) * static_cast<int64_t>(sizeof(T)));
}

// The sum of an array's parts.
Status download_parts(const double* from, std::vector<double>& to) {
  std::vector<double> parts(kNumSplits * to.size());
  KVX_RETURN_IF_ERROR(download(from, parts));
  for (size_t i = 0; i < parts.size(); ++i) to[i % to.size()] += parts[i];
  return {};
}

}  // namespace

Result<std::unique_ptr<DeviceStatistics>> DeviceStatistics::create(const StatisticsConfig& config,
                                                                   int device) {
  if (config.has_k_moments) {
    return unsupported("K's second moments are collected on the host alone; give these rows there");
  }
  KVX_ASSIGN_OR_RETURN(const auto current, device::CurrentCudaDevice::set(device));
  KVX_ASSIGN_OR_RETURN(auto memory, cache::cuda_memory(device));
  KVX_ASSIGN_OR_RETURN(device::CudaEvent last, device::CudaEvent::create());
  std::unique_ptr<DeviceStatistics> statistics(
      new DeviceStatistics(config, device, std::move(memory), std::move(last)));
  KVX_ASSIGN_OR_RETURN(statistics->bad_, statistics->memory_->allocate(sizeof(gpu::BadNumber),
                                                                       "a number that is bad"));
  KVX_RETURN_IF_ERROR(statistics->upload_turns());
  return statistics;
}

Status DeviceStatistics::upload_turns() {
  if (!config_.rope) return {};
  const std::vector<double>& inv_freq = config_.rope->inv_freq;
  const int64_t bytes = std::ssize(inv_freq) * static_cast<int64_t>(sizeof(double));
  KVX_ASSIGN_OR_RETURN(inv_freq_, memory_->allocate(bytes, "frequencies of rotation"));
  KVX_RETURN_IF_ERROR(device::cuda_copy(inv_freq_.data(), inv_freq.data(), bytes));
  turns_.inv_freq = reinterpret_cast<const double*>(inv_freq_.data());
  turns_.num_pairs = static_cast<int>(inv_freq.size());
  turns_.is_interleaved = config_.rope->pairs == kv::RopePairs::kInterleaved;
  turns_.attention_scaling = config_.rope->attention_scaling;
  return {};
}

Status DeviceStatistics::check_layer(int layer) const {
  if (layer >= 0 && layer < config_.num_layers) return {};
  return invalid_argument("layer is {}; expected 0 to {}", layer, config_.num_layers - 1);
}

// One region: doubles first, so that every array is aligned.
Status DeviceStatistics::allocate(Channels& channels, int head_dim, bool has_unturned) {
  if (channels.memory.bytes() > 0) return {};
  const int64_t size = int64_t{config_.num_kv_heads} * head_dim;
  const int64_t num_sums = (has_unturned ? 3 : 2) * kNumSplits * size;
  const int64_t num_words = size * (1 + LogHistogram::kNumBuckets);
  KVX_ASSIGN_OR_RETURN(channels.memory,
                       memory_->allocate(num_sums * 8 + num_words * 4, "statistics of a layer"));
  auto* doubles = reinterpret_cast<double*>(channels.memory.data());
  channels.at.sums = doubles;
  channels.at.square_sums = doubles + kNumSplits * size;
  if (has_unturned) channels.at.unturned_sums = doubles + 2 * kNumSplits * size;
  channels.at.largest = reinterpret_cast<float*>(doubles + num_sums);
  channels.at.counts = reinterpret_cast<uint32_t*>(channels.at.largest + size);
  return {};
}

gpu::CountedRows DeviceStatistics::counted(int layer, int side, int64_t first_position,
                                           int num_rows, int num_heads, int head_dim,
                                           const FloatRows& rows) const {
  gpu::CountedRows counted;
  counted.rows = rows;
  counted.num_rows = num_rows;
  counted.num_heads = num_heads;
  counted.head_dim = head_dim;
  counted.first_position = first_position;
  counted.layer = layer;
  counted.side = side;
  counted.bad = reinterpret_cast<gpu::BadNumber*>(bad_.data());
  return counted;
}

Status DeviceStatistics::begin(device::CudaStream stream) {
  return last_.hold_back(stream);
}

Status DeviceStatistics::feed(device::CudaStream stream, int layer, int64_t first_position,
                              int num_rows, const FloatRows& k, const FloatRows& v) {
  KVX_RETURN_IF_ERROR(check_layer(layer));
  const std::lock_guard lock(mutex_);
  KVX_ASSIGN_OR_RETURN(const auto current, device::CurrentCudaDevice::set(device_));
  Layer& to = layers_[layer];
  KVX_RETURN_IF_ERROR(allocate(to.k, config_.k_head_dim, config_.rope.has_value()));
  KVX_RETURN_IF_ERROR(allocate(to.v, config_.v_head_dim, false));
  KVX_RETURN_IF_ERROR(begin(stream));
  const int num_heads = config_.num_kv_heads;
  const gpu::CountedRows keys =
      counted(layer, 0, first_position, num_rows, num_heads, config_.k_head_dim, k);
  KVX_RETURN_IF_ERROR(config_.rope ? count_turned(stream, keys, to.k.at)
                                   : gpu::launch_count_channels(stream, keys, to.k.at, turns_));
  KVX_RETURN_IF_ERROR(gpu::launch_count_channels(
      stream, counted(layer, 1, first_position, num_rows, num_heads, config_.v_head_dim, v),
      to.v.at, {}));
  to.num_rows += num_rows;
  to.num_mean_rows += num_rows - num_sink_rows(first_position, num_rows);
  return end(stream);
}

// Strip by strip, since the table has numbers for every position.
Status DeviceStatistics::count_turned(device::CudaStream stream, const gpu::CountedRows& rows,
                                      const gpu::ChannelSums& to) {
  const int64_t bytes = int64_t{kMostTurnedRows} * turns_.num_pairs * 2 * 4;
  if (turn_table_.bytes() == 0) {
    KVX_ASSIGN_OR_RETURN(turn_table_, memory_->allocate(bytes, "angles of rotation"));
  }
  auto* const table = reinterpret_cast<float*>(turn_table_.data());
  gpu::Turns turns = turns_;
  turns.table = table;
  for (int first = 0; first < rows.num_rows; first += kMostTurnedRows) {
    gpu::CountedRows strip = rows;
    strip.num_rows = std::min(kMostTurnedRows, rows.num_rows - first);
    strip.first_position += first;
    strip.rows.data += first * rows.rows.token_stride * bytes_of(rows.rows.dtype);
    KVX_RETURN_IF_ERROR(
        gpu::launch_make_turns(stream, turns, strip.first_position, strip.num_rows, table));
    KVX_RETURN_IF_ERROR(gpu::launch_count_channels(stream, strip, to, turns));
  }
  return {};
}

Status DeviceStatistics::feed_queries(device::CudaStream stream, int layer, int64_t first_position,
                                      int num_rows, const FloatRows& q) {
  KVX_RETURN_IF_ERROR(check_layer(layer));
  const std::lock_guard lock(mutex_);
  KVX_ASSIGN_OR_RETURN(const auto current, device::CurrentCudaDevice::set(device_));
  Layer& to = layers_[layer];
  if (to.query_sums.bytes() == 0) {
    const int64_t size = int64_t{config_.k_head_dim} * config_.k_head_dim;
    KVX_ASSIGN_OR_RETURN(
        to.query_sums,
        memory_->allocate(kNumSplits * config_.num_kv_heads * size * 8, "moments of queries"));
  }
  KVX_RETURN_IF_ERROR(begin(stream));
  KVX_RETURN_IF_ERROR(gpu::launch_add_moments(
      stream,
      counted(layer, 2, first_position, num_rows, config_.num_q_heads, config_.k_head_dim, q),
      config_.num_kv_heads, reinterpret_cast<double*>(to.query_sums.data())));
  to.num_queries += int64_t{num_rows} * (config_.num_q_heads / config_.num_kv_heads);
  return end(stream);
}

Status DeviceStatistics::check_finite() {
  gpu::BadNumber bad;
  KVX_RETURN_IF_ERROR(device::cuda_copy(&bad, bad_.data(), sizeof bad));
  if (bad.is_found == 0) return {};
  return invalid_argument(
      "{} of layer {} is {} at position {}, head {}, channel {}; expected finite numbers; these "
      "statistics have counted it and are of no use any more",
      kSideNames[bad.side], bad.layer, bad.value, bad.position, bad.head, bad.channel);
}

Status DeviceStatistics::drain(Statistics& to) {
  const std::lock_guard lock(mutex_);
  KVX_ASSIGN_OR_RETURN(const auto current, device::CurrentCudaDevice::set(device_));
  KVX_RETURN_IF_ERROR(last_.wait());
  KVX_RETURN_IF_ERROR(check_finite());
  for (int layer = 0; layer < config_.num_layers; ++layer) {
    Layer& from = layers_[layer];
    if (from.num_rows > 0) {
      KVX_RETURN_IF_ERROR(drain_channels(layer, Side::kK, to));
      KVX_RETURN_IF_ERROR(drain_channels(layer, Side::kV, to));
      from.num_rows = from.num_mean_rows = 0;
    }
    if (from.num_queries > 0) {
      KVX_RETURN_IF_ERROR(drain_queries(layer, to));
      from.num_queries = 0;
    }
  }
  return {};
}

Status DeviceStatistics::drain_channels(int layer, Side side, Statistics& to) {
  Layer& of = layers_[layer];
  const Channels& from = side == Side::kK ? of.k : of.v;
  const ChannelStatistics& shape = to.of(layer, side);
  ChannelStatistics counted;
  counted.num_rows = of.num_rows;
  counted.num_mean_rows = of.num_mean_rows;
  counted.sums.resize(shape.sums.size());
  counted.square_sums.resize(shape.square_sums.size());
  counted.unturned_sums.resize(shape.unturned_sums.size());
  counted.largest.resize(shape.largest.size());
  counted.counts.resize(shape.counts.size());
  KVX_RETURN_IF_ERROR(download_parts(from.at.sums, counted.sums));
  KVX_RETURN_IF_ERROR(download_parts(from.at.square_sums, counted.square_sums));
  if (from.at.unturned_sums != nullptr) {
    KVX_RETURN_IF_ERROR(download_parts(from.at.unturned_sums, counted.unturned_sums));
  }
  KVX_RETURN_IF_ERROR(download(from.at.largest, counted.largest));
  KVX_RETURN_IF_ERROR(download(from.at.counts, counted.counts));
  to.add(layer, side, counted);
  return device::cuda_fill(from.memory.data(), 0, from.memory.bytes());
}

Status DeviceStatistics::drain_queries(int layer, Statistics& to) {
  const Layer& from = layers_[layer];
  const int64_t size = int64_t{config_.k_head_dim} * config_.k_head_dim;
  std::vector<double> sums(static_cast<size_t>(config_.num_kv_heads * size));
  KVX_RETURN_IF_ERROR(
      download_parts(reinterpret_cast<const double*>(from.query_sums.data()), sums));
  for (int head = 0; head < config_.num_kv_heads; ++head) {
    to.add_query_sums(layer, head, from.num_queries, sums.data() + head * size);
  }
  return device::cuda_fill(from.query_sums.data(), 0, from.query_sums.bytes());
}

Result<DeviceStatistics*> StatisticsCollector::on_device(int device) {
  const std::lock_guard lock(mutex_);
  std::unique_ptr<DeviceStatistics>& found = on_devices_[device];
  if (!found) {
    KVX_ASSIGN_OR_RETURN(found, DeviceStatistics::create(config(), device));
  }
  return found.get();
}

Result<Statistics*> StatisticsCollector::collected() {
  const std::lock_guard lock(mutex_);
  for (const auto& [device, statistics] : on_devices_) {
    if (statistics) KVX_RETURN_IF_ERROR(statistics->drain(statistics_));
  }
  return &statistics_;
}

}  // namespace kvx::tune
