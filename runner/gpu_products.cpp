// cuBLAS is opened by name, as a GPU machine's pip or system packages have it. Its constants below
// are those of its API reference (cublasOperation_t, cublasComputeType_t, cudaDataType_t).
#include "runner/gpu_products.hpp"

#include <dlfcn.h>

#include <algorithm>

#include "core/float16.hpp"
#include "device/cuda_async.hpp"

namespace kvx::runner {
namespace {

using Handle = void*;

constexpr int kNotTransposed = 0;  // CUBLAS_OP_N
constexpr int kTransposed = 1;     // CUBLAS_OP_T
constexpr int kTypeF32 = 0;        // CUDA_R_32F
constexpr int kTypeBf16 = 14;      // CUDA_R_16BF
constexpr int kComputeF32 = 68;    // CUBLAS_COMPUTE_32F
constexpr int kAnyAlgorithm = -1;  // CUBLAS_GEMM_DEFAULT

constexpr const char* kLibraries[] = {"libcublas.so.13", "libcublas.so.12", "libcublas.so"};
constexpr int64_t kMostOutputBytes = 16 << 20;  // of a strip of tokens
constexpr int64_t kWorkspaceBytes = 32 << 20;   // what cuBLAS wants on a GPU of 9.0

}  // namespace

struct Cublas {
  Cublas() = default;
  Cublas(const Cublas&) = delete;
  Cublas& operator=(const Cublas&) = delete;
  ~Cublas() {
    if (handle != nullptr) destroy(handle);
    if (library != nullptr) dlclose(library);
  }

  void* library = nullptr;
  Handle handle = nullptr;
  int (*create)(Handle*) = nullptr;
  int (*destroy)(Handle) = nullptr;
  int (*set_stream)(Handle, device::CudaStream) = nullptr;
  int (*set_workspace)(Handle, void*, size_t) = nullptr;
  int (*gemm)(Handle, int, int, int, int, int, const void*, const void*, int, int, const void*, int,
              int, const void*, void*, int, int, int, int) = nullptr;
};

namespace {

template <class Function>
bool find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  return function != nullptr;
}

Status status_of(int code, const char* call) {
  if (code == 0) return {};
  return internal_error("{} of cuBLAS failed with status {}", call, code);
}

Result<std::unique_ptr<Cublas>> open_cublas() {
  auto cublas = std::make_unique<Cublas>();
  for (const char* name : kLibraries) {
    cublas->library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (cublas->library != nullptr) break;
  }
  if (cublas->library == nullptr) {
    return unsupported(
        "no {} is found; install CUDA's libcublas, or name its folder in "
        "LD_LIBRARY_PATH (pip's nvidia-cublas has one)",
        kLibraries[0]);
  }
  void* library = cublas->library;
  if (!find(library, "cublasCreate_v2", cublas->create) ||
      !find(library, "cublasDestroy_v2", cublas->destroy) ||
      !find(library, "cublasSetStream_v2", cublas->set_stream) ||
      !find(library, "cublasSetWorkspace_v2", cublas->set_workspace) ||
      !find(library, "cublasGemmEx", cublas->gemm)) {
    return unsupported("the libcublas that is found lacks cublasGemmEx; expected version 12 or 13");
  }
  KVX_RETURN_IF_ERROR(status_of(cublas->create(&cublas->handle), "cublasCreate"));
  return cublas;
}

// numbers in the weights' type, where to points.
void store(const float* numbers, int64_t count, DType type, uint8_t* to) {
  if (type == DType::kF32) {
    std::copy_n(numbers, count, reinterpret_cast<float*>(to));
    return;
  }
  auto* out = reinterpret_cast<uint16_t*>(to);
  for (int64_t i = 0; i < count; ++i) out[i] = f32_to_bf16(numbers[i]);
}

}  // namespace

GpuLinear::GpuLinear(GpuProducts& gpu, int num_columns, std::vector<LinearPart> parts, DType type)
    : gpu_(gpu), num_columns_(num_columns), parts_(std::move(parts)), type_(type) {
  for (const LinearPart& part : parts_) num_rows_ += part.num_rows;
}

Status GpuLinear::upload() {
  const int64_t row_bytes = int64_t{num_columns_} * bytes_of(type_);
  KVX_ASSIGN_OR_RETURN(weights_, gpu_.memory_->allocate(num_rows_ * row_bytes, "weights"));
  constexpr int kRowsAtOnce = 1024;
  std::vector<float> rows(static_cast<size_t>(kRowsAtOnce) * num_columns_);
  std::vector<uint8_t> stored(kRowsAtOnce * row_bytes);
  uint8_t* to = weights_.data();
  for (const LinearPart& part : parts_) {
    for (int first = 0; first < part.num_rows; first += kRowsAtOnce) {
      const int count = std::min(kRowsAtOnce, part.num_rows - first);
      part.read_rows(first, count, rows.data());
      store(rows.data(), int64_t{count} * num_columns_, type_, stored.data());
      KVX_RETURN_IF_ERROR(device::cuda_copy(to, stored.data(), count * row_bytes));
      to += count * row_bytes;
    }
  }
  return upload_bias();
}

Status GpuLinear::upload_bias() {
  const auto has_bias = [](const LinearPart& part) { return !part.bias.empty(); };
  if (std::ranges::none_of(parts_, has_bias)) return {};
  std::vector<float> bias;
  for (const LinearPart& part : parts_) {
    bias.insert(bias.end(), part.bias.begin(), part.bias.end());
    bias.resize(bias.size() + (has_bias(part) ? 0 : part.num_rows));
  }
  const int64_t bytes = int64_t{num_rows_} * 4;
  KVX_ASSIGN_OR_RETURN(bias_, gpu_.memory_->allocate(bytes, "biases"));
  return device::cuda_copy(bias_.data(), bias.data(), bytes);
}

Status GpuLinear::multiply(const float* x, int num_tokens, std::span<float* const> outs,
                           Executor&) {
  const auto most = static_cast<int>(std::max<int64_t>(1, kMostOutputBytes / 4 / num_rows_));
  for (int first = 0; first < num_tokens; first += most) {
    const int count = std::min(most, num_tokens - first);
    KVX_RETURN_IF_ERROR(multiply_strip(x + int64_t{first} * num_columns_, count));
    hand_out(first, count, outs);
  }
  return {};
}

// Into gpu_.output_, on the host.
Status GpuLinear::multiply_strip(const float* x, int num_tokens) {
  const int64_t count = int64_t{num_tokens} * num_columns_;
  const int64_t input_bytes = count * bytes_of(type_);
  const int64_t output_bytes = int64_t{num_tokens} * num_rows_ * 4;
  KVX_RETURN_IF_ERROR(gpu_.reserve(gpu_.input_, input_bytes));
  KVX_RETURN_IF_ERROR(gpu_.reserve(gpu_.output_, output_bytes));
  store(x, count, type_, gpu_.input_.host.data());
  const device::CudaStream stream = gpu_.stream_.get();
  KVX_RETURN_IF_ERROR(gpu_.use_stream(stream));
  KVX_RETURN_IF_ERROR(device::cuda_copy_async(gpu_.input_.device.data(), gpu_.input_.host.data(),
                                              input_bytes, stream));
  KVX_RETURN_IF_ERROR(multiply_on_gpu(gpu_.input_.device.data(), num_tokens,
                                      reinterpret_cast<float*>(gpu_.output_.device.data())));
  KVX_RETURN_IF_ERROR(device::cuda_copy_async(gpu_.output_.host.data(), gpu_.output_.device.data(),
                                              output_bytes, stream));
  return device::cuda_synchronize(stream);
}

// cuBLAS counts columns first: its [rows, tokens] is our [tokens, rows].
Status GpuLinear::multiply_on_gpu(const void* x, int num_tokens, float* out) {
  const float one = 1.0f, zero = 0.0f;
  const int type = type_ == DType::kF32 ? kTypeF32 : kTypeBf16;
  return status_of(
      gpu_.cublas_->gemm(gpu_.cublas_->handle, kTransposed, kNotTransposed, num_rows_, num_tokens,
                         num_columns_, &one, weights_.data(), type, num_columns_, x, type,
                         num_columns_, &zero, out, kTypeF32, num_rows_, kComputeF32, kAnyAlgorithm),
      "cublasGemmEx");
}

void GpuLinear::hand_out(int first_token, int num_tokens, std::span<float* const> outs) const {
  const auto* from = reinterpret_cast<const float*>(gpu_.output_.host.data());
  for (int token = first_token; token < first_token + num_tokens; ++token) {
    for (size_t p = 0; p < parts_.size(); ++p) {
      const LinearPart& part = parts_[p];
      float* to = outs[p] + int64_t{token} * part.num_rows;
      std::copy_n(from, part.num_rows, to);
      for (size_t row = 0; row < part.bias.size(); ++row) to[row] += part.bias[row];
      from += part.num_rows;
    }
  }
}

GpuProducts::GpuProducts(device::CudaDevice device, device::OwnedCudaStream stream,
                         device::CudaEvent last, std::unique_ptr<Cublas> cublas)
    : device_(std::move(device)),
      stream_(std::move(stream)),
      last_(std::move(last)),
      cublas_(std::move(cublas)) {}

GpuProducts::~GpuProducts() = default;

Result<std::unique_ptr<GpuProducts>> GpuProducts::create() {
  KVX_ASSIGN_OR_RETURN(device::CudaDevice device, device::open_cuda_device());
  KVX_ASSIGN_OR_RETURN(device::OwnedCudaStream stream, device::OwnedCudaStream::create());
  KVX_ASSIGN_OR_RETURN(device::CudaEvent last, device::CudaEvent::create());
  KVX_ASSIGN_OR_RETURN(auto cublas, open_cublas());
  std::unique_ptr<GpuProducts> products(
      new GpuProducts(std::move(device), std::move(stream), std::move(last), std::move(cublas)));
  KVX_ASSIGN_OR_RETURN(products->memory_, cache::cuda_memory(products->device_.index));
  KVX_ASSIGN_OR_RETURN(products->pinned_, cache::pinned_memory(products->device_.index));
  KVX_ASSIGN_OR_RETURN(products->workspace_,
                       products->memory_->allocate(kWorkspaceBytes, "cuBLAS' workspace"));
  return products;
}

Result<std::unique_ptr<Linear>> GpuProducts::create_linear(int num_columns,
                                                           std::vector<LinearPart> parts,
                                                           DType weights) {
  auto linear = std::make_unique<GpuLinear>(*this, num_columns, std::move(parts), weights);
  KVX_RETURN_IF_ERROR(linear->upload());
  return std::unique_ptr<Linear>(std::move(linear));
}

// A new stream takes cuBLAS' workspace away.
Status GpuProducts::use_stream(device::CudaStream stream) {
  KVX_RETURN_IF_ERROR(last_.hold_back(stream));
  KVX_RETURN_IF_ERROR(status_of(cublas_->set_stream(cublas_->handle, stream), "cublasSetStream"));
  return status_of(cublas_->set_workspace(cublas_->handle, workspace_.data(), kWorkspaceBytes),
                   "cublasSetWorkspace");
}

Status GpuProducts::reserve(Staged& staged, int64_t bytes) {
  if (bytes <= staged.device.bytes()) return {};
  staged = {};
  KVX_ASSIGN_OR_RETURN(staged.device, memory_->allocate(bytes, "rows of a product"));
  KVX_ASSIGN_OR_RETURN(staged.host, pinned_->allocate(bytes, "rows of a product"));
  return {};
}

}  // namespace kvx::runner
