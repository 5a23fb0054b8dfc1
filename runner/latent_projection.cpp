// Latent attention's products, a head at a time; the rows between them are moved, not multiplied.
#include "runner/latent_projection.hpp"

#include <algorithm>
#include <array>

#include "runner/dequantize.hpp"
#include "runner/elementwise.hpp"

namespace kvx::runner {
namespace {

float* sized(std::vector<float>& buffer, int64_t size) {
  if (buffer.size() < static_cast<size_t>(size)) buffer.resize(static_cast<size_t>(size));
  return buffer.data();
}

// num_rows rows of num_numbers, from_stride and to_stride floats apart.
void copy_rows(const float* from, int64_t from_stride, float* to, int64_t to_stride, int num_rows,
               int num_numbers) {
  for (int64_t row = 0; row < num_rows; ++row) {
    std::copy_n(from + row * from_stride, num_numbers, to + row * to_stride);
  }
}

// A matrix of a head that the file has the other way round: [num_columns, num_rows] at first_row.
LinearPart columns_of(const GgufTensor& tensor, int64_t first_row, int num_columns, int num_rows) {
  std::vector<float> whole(static_cast<size_t>(num_columns) * num_rows);
  dequantize(tensor.type, tensor.row(first_row), std::ssize(whole), whole.data());
  LinearPart part;
  part.num_rows = num_rows;
  part.read_rows = [whole = std::move(whole), num_columns, num_rows](int first, int rows,
                                                                     float* out) {
    for (int row = first; row < first + rows; ++row) {
      for (int column = 0; column < num_columns; ++column) {
        *out++ = whole[static_cast<size_t>(column) * num_rows + row];
      }
    }
  };
  return part;
}

std::vector<LinearPart> one(LinearPart part) {
  std::vector<LinearPart> parts;
  parts.push_back(std::move(part));
  return parts;
}

}  // namespace

Result<std::unique_ptr<LatentProjection>> LatentProjection::load(const WeightLoader& weights,
                                                                 const ModelConfig& config,
                                                                 const std::string& prefix) {
  std::unique_ptr<LatentProjection> projection(new LatentProjection(config));
  KVX_RETURN_IF_ERROR(projection->load_queries(weights, prefix));
  KVX_RETURN_IF_ERROR(projection->load_rows(weights, prefix));
  KVX_RETURN_IF_ERROR(projection->load_heads(weights, prefix));
  return projection;
}

Status LatentProjection::load_queries(const WeightLoader& weights, const std::string& prefix) {
  const LatentSizes& sizes = config_.latent;
  const int64_t head_rows = sizes.nope_dim + sizes.rotary_dim;
  int num_columns = config_.hidden;
  std::string name = prefix + "attn_q.weight";
  if (sizes.query_rank > 0) {
    num_columns = sizes.query_rank;
    name = prefix + "attn_q_b.weight";
    KVX_ASSIGN_OR_RETURN(
        query_down_,
        weights.load_linear(config_.hidden, {{{prefix + "attn_q_a.weight", sizes.query_rank}}}));
    KVX_ASSIGN_OR_RETURN(query_norm_,
                         weights.load_vector(prefix + "attn_q_a_norm.weight", sizes.query_rank));
  }
  KVX_ASSIGN_OR_RETURN(
      const GgufTensor* tensor,
      weights.find(name, std::array{int64_t{num_columns}, config_.num_q_heads * head_rows}));
  std::vector<LinearPart> parts;
  for (int h = 0; h < config_.num_q_heads; ++h) {
    parts.push_back(rows_of(*tensor, h * head_rows, sizes.nope_dim));
  }
  for (int h = 0; h < config_.num_q_heads; ++h) {
    parts.push_back(rows_of(*tensor, h * head_rows + sizes.nope_dim, sizes.rotary_dim));
  }
  KVX_ASSIGN_OR_RETURN(query_, weights.create_linear(num_columns, std::move(parts)));
  return {};
}

Status LatentProjection::load_rows(const WeightLoader& weights, const std::string& prefix) {
  const LatentSizes& sizes = config_.latent;
  KVX_ASSIGN_OR_RETURN(
      const GgufTensor* tensor,
      weights.find(prefix + "attn_kv_a_mqa.weight",
                   std::array{int64_t{config_.hidden}, int64_t{config_.head_dim}}));
  std::vector<LinearPart> parts;
  parts.push_back(rows_of(*tensor, 0, sizes.latent_dim));
  parts.push_back(rows_of(*tensor, sizes.latent_dim, sizes.rotary_dim));
  KVX_ASSIGN_OR_RETURN(row_, weights.create_linear(config_.hidden, std::move(parts)));
  KVX_ASSIGN_OR_RETURN(latent_norm_,
                       weights.load_vector(prefix + "attn_kv_a_norm.weight", sizes.latent_dim));
  return {};
}

// Newer files have a tensor each for keys (its matrices the other way round) and values, older ones
// both in one.
Status LatentProjection::load_heads(const WeightLoader& weights, const std::string& prefix) {
  const LatentSizes& sizes = config_.latent;
  const int64_t heads = config_.num_q_heads;
  const int64_t latent = sizes.latent_dim;
  const GgufTensor* keys = nullptr;
  const GgufTensor* values = nullptr;
  const GgufTensor* both = nullptr;
  if (weights.contains(prefix + "attn_kv_b.weight")) {
    const int64_t rows = heads * (sizes.nope_dim + sizes.value_dim);
    KVX_ASSIGN_OR_RETURN(both, weights.find(prefix + "attn_kv_b.weight", std::array{latent, rows}));
  } else {
    KVX_ASSIGN_OR_RETURN(keys, weights.find(prefix + "attn_k_b.weight",
                                            std::array{int64_t{sizes.nope_dim}, latent, heads}));
    KVX_ASSIGN_OR_RETURN(values, weights.find(prefix + "attn_v_b.weight",
                                              std::array{latent, int64_t{sizes.value_dim}, heads}));
  }
  for (int64_t h = 0; h < heads; ++h) {
    const int64_t of_head = h * (sizes.nope_dim + sizes.value_dim);
    LinearPart key = both == nullptr ? rows_of(*keys, h * latent, sizes.latent_dim)
                                     : columns_of(*both, of_head, sizes.nope_dim, sizes.latent_dim);
    LinearPart value = both == nullptr ? rows_of(*values, h * sizes.value_dim, sizes.value_dim)
                                       : rows_of(*both, of_head + sizes.nope_dim, sizes.value_dim);
    KVX_ASSIGN_OR_RETURN(auto to_latent,
                         weights.create_linear(sizes.nope_dim, one(std::move(key))));
    KVX_ASSIGN_OR_RETURN(auto to_value,
                         weights.create_linear(sizes.latent_dim, one(std::move(value))));
    to_latent_.push_back(std::move(to_latent));
    to_value_.push_back(std::move(to_value));
  }
  return {};
}

Status LatentProjection::project(const float* x, int num_tokens, const RopeAngles& angles, float* q,
                                 float* k, Executor& executor) {
  const LatentSizes& sizes = config_.latent;
  float* latent = sized(latent_, int64_t{num_tokens} * sizes.latent_dim);
  float* rotary = sized(rotary_, int64_t{num_tokens} * sizes.rotary_dim);
  KVX_RETURN_IF_ERROR(row_->multiply(x, num_tokens, std::array{latent, rotary}, executor));
  rms_norm(latent, num_tokens, latent_norm_, config_.norm_epsilon, latent, executor);
  rope(rotary, num_tokens, 1, sizes.rotary_dim, sizes.rotary_dim / 2, angles.cosines, angles.sines,
       executor);
  copy_rows(latent, sizes.latent_dim, k, config_.head_dim, num_tokens, sizes.latent_dim);
  copy_rows(rotary, sizes.rotary_dim, k + sizes.latent_dim, config_.head_dim, num_tokens,
            sizes.rotary_dim);
  return project_queries(x, num_tokens, angles, q, executor);
}

Status LatentProjection::project_queries(const float* x, int num_tokens, const RopeAngles& angles,
                                         float* q, Executor& executor) {
  const LatentSizes& sizes = config_.latent;
  const int heads = config_.num_q_heads;
  if (query_down_) {
    float* rank = sized(rank_, int64_t{num_tokens} * sizes.query_rank);
    KVX_RETURN_IF_ERROR(query_down_->multiply(x, num_tokens, std::array{rank}, executor));
    rms_norm(rank, num_tokens, query_norm_, config_.norm_epsilon, rank, executor);
    x = rank;
  }
  const int64_t nope_size = int64_t{num_tokens} * sizes.nope_dim;
  const int64_t rotary_size = int64_t{num_tokens} * sizes.rotary_dim;
  float* parts = sized(head_parts_, heads * (nope_size + rotary_size));
  std::vector<float*> outs;
  for (int h = 0; h < heads; ++h) outs.push_back(parts + h * nope_size);
  for (int h = 0; h < heads; ++h) outs.push_back(parts + heads * nope_size + h * rotary_size);
  KVX_RETURN_IF_ERROR(query_->multiply(x, num_tokens, outs, executor));

  const int64_t stride = int64_t{heads} * config_.head_dim;
  float* latent = sized(latent_, int64_t{num_tokens} * sizes.latent_dim);
  for (int h = 0; h < heads; ++h) {
    float* row = q + int64_t{h} * config_.head_dim;
    float* rotary = outs[heads + h];
    KVX_RETURN_IF_ERROR(to_latent_[h]->multiply(outs[h], num_tokens, std::array{latent}, executor));
    rope(rotary, num_tokens, 1, sizes.rotary_dim, sizes.rotary_dim / 2, angles.cosines,
         angles.sines, executor);
    copy_rows(latent, sizes.latent_dim, row, stride, num_tokens, sizes.latent_dim);
    copy_rows(rotary, sizes.rotary_dim, row + sizes.latent_dim, stride, num_tokens,
              sizes.rotary_dim);
  }
  return {};
}

Status LatentProjection::expand(const float* attended, int num_tokens, float* out,
                                Executor& executor) {
  const LatentSizes& sizes = config_.latent;
  const int heads = config_.num_q_heads;
  float* latent = sized(latent_, int64_t{num_tokens} * sizes.latent_dim);
  float* values = sized(values_, int64_t{num_tokens} * sizes.value_dim);
  for (int h = 0; h < heads; ++h) {
    copy_rows(attended + int64_t{h} * sizes.latent_dim, int64_t{heads} * sizes.latent_dim, latent,
              sizes.latent_dim, num_tokens, sizes.latent_dim);
    KVX_RETURN_IF_ERROR(to_value_[h]->multiply(latent, num_tokens, std::array{values}, executor));
    copy_rows(values, sizes.value_dim, out + int64_t{h} * sizes.value_dim,
              int64_t{heads} * sizes.value_dim, num_tokens, sizes.value_dim);
  }
  return {};
}

}  // namespace kvx::runner
