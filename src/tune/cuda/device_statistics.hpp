// DeviceStatistics: Statistics of rows that lie on a GPU, counted there. StatisticsCollector: what
// an engine feeds, from the host or from GPUs, as one.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "cache/pool/memory.hpp"
#include "device/cuda_async.hpp"
#include "tune/cuda/statistics_kernels.hpp"
#include "tune/statistics.hpp"

namespace kvx::tune {

class DeviceStatistics {
 public:
  // UNSUPPORTED: no such device in this build; or moments of K, which nothing on a GPU asks for.
  // A layer's memory is allocated with its first rows, [num_kv_heads, head_dim] histograms of 4 KiB
  // for K and for V.
  static Result<std::unique_ptr<DeviceStatistics>> create(const StatisticsConfig& config,
                                                          int device);

  // Rows on the device, as Statistics::feed() takes them, of any strides and float type. Launched
  // on the stream when it returns: the rows must stay until the stream has passed. The order of
  // calls on several streams is kept. OUT_OF_RANGE: no room for the layer's sums.
  // A number that is not finite is an error of drain().
  Status feed(device::CudaStream stream, int layer, int64_t first_position, int num_rows,
              const FloatRows& k, const FloatRows& v);
  Status feed_queries(device::CudaStream stream, int layer, int64_t first_position, int num_rows,
                      const FloatRows& q);

  // Waits for the device, adds what was counted to `to`, and begins again. INVALID_ARGUMENT, now
  // and from now on: a NaN or an infinity was fed, named by layer, position, head and channel.
  Status drain(Statistics& to);

 private:
  // One side of a layer, on the device.
  struct Channels {
    cache::Region memory;
    gpu::ChannelSums at;
  };
  struct Layer {
    Channels k, v;
    cache::Region query_sums;
    int64_t num_rows = 0;  // since the last drain()
    int64_t num_mean_rows = 0;
    int64_t num_queries = 0;  // of a KV head
  };

  DeviceStatistics(const StatisticsConfig& config, int device,
                   std::unique_ptr<cache::Memory> memory, device::CudaEvent last)
      : config_(config),
        device_(device),
        memory_(std::move(memory)),
        last_(std::move(last)),
        layers_(static_cast<size_t>(config.num_layers)) {}
  Status upload_turns();
  Status check_layer(int layer) const;
  Status allocate(Channels& channels, int head_dim, bool has_unturned);
  gpu::CountedRows counted(int layer, int side, int64_t first_position, int num_rows, int num_heads,
                           int head_dim, const FloatRows& rows) const;
  // Of K, with its sums before the rotation.
  Status count_turned(device::CudaStream stream, const gpu::CountedRows& rows,
                      const gpu::ChannelSums& to);
  // Around a call's launches: they follow those of the call before, whatever its stream was.
  Status begin(device::CudaStream stream);
  Status end(device::CudaStream stream) { return last_.record(stream); }
  Status check_finite();
  Status drain_channels(int layer, Side side, Statistics& to);
  Status drain_queries(int layer, Statistics& to);

  std::mutex mutex_;
  StatisticsConfig config_;
  int device_;
  std::unique_ptr<cache::Memory> memory_;
  device::CudaEvent last_;
  cache::Region bad_;       // a gpu::BadNumber
  cache::Region inv_freq_;  // [num_pairs]
  gpu::Turns turns_;
  cache::Region turn_table_;  // [kMostTurnedRows, num_pairs, 2]
  std::vector<Layer> layers_;
};

class StatisticsCollector {
 public:
  explicit StatisticsCollector(Statistics statistics) : statistics_(std::move(statistics)) {}

  const StatisticsConfig& config() const { return statistics_.config(); }
  // For what lies on the host, and for merges.
  Statistics& on_host() { return statistics_; }
  // DeviceStatistics::create's errors.
  Result<DeviceStatistics*> on_device(int device);
  // All that was fed. Waits for the GPUs that were; DeviceStatistics::drain's errors.
  Result<Statistics*> collected();

 private:
  std::mutex mutex_;
  Statistics statistics_;
  std::map<int, std::unique_ptr<DeviceStatistics>> on_devices_;
};

}  // namespace kvx::tune
