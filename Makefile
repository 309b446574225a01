# Each target sets up what it needs itself: a machine with Go and make, and root on Debian for the programs
# that are missing, is enough.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules --no-print-directory

# Go's own archive unpacks to /usr/local/go, and Debian keeps mkfs in sbin: neither is on every PATH.
export PATH := $(PATH):/usr/local/go/bin:/usr/local/sbin:/usr/sbin:/sbin

# The same for programs, tests and linters, so that each package is compiled once, and once more for the race detector. Debug
# information, which programs that are released do not have, would take a sixth of the time.
export CGO_ENABLED ?= 0
ifeq (,$(findstring -dwarf=false,$(GOFLAGS)))
export GOFLAGS := $(strip $(GOFLAGS) -trimpath -gcflags=all=-dwarf=false)
endif

VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo dev)
ARCHES := amd64 arm64

# The programs that have an image, each a stage of the Dockerfile and an entry of test/cmd/image. An image's name begins with
# IMAGE_PREFIX.
IMAGES := hostpath-csi-driver hostpath-provisioner hostpath-provisioner-operator local-pv-provisioner pool-mounter

# Where the files of a release are offered, and its documents, runbooks and source are. Of this alone a fork has another value: IMAGE_PREFIX is where the
# workflow of the repository can push, as in deploy/, or where else a release is to be.
export REPOSITORY ?= https://github.com/kubevirt/hostpath-provisioner
IMAGE_PREFIX ?= $(patsubst https://github.com/%,ghcr.io/%/,$(REPOSITORY))

# Static, so that the binary runs FROM scratch and on any host; without paths, so that it can be reproduced.
# Without grpcnotrace, gRPC links golang.org/x/net/trace, whose templates call methods by name: the linker then keeps
# all methods of all types, which is 2.7 MB of the driver.
RELEASED := kubevirt.io/hostpath-provisioner/pkg/version
GO_BUILD := CGO_ENABLED=0 go build -tags grpcnotrace -ldflags '-s -w -X $(RELEASED).built=$(VERSION) -X $(RELEASED).images=$(IMAGE_PREFIX) -X $(RELEASED).repository=$(REPOSITORY)'
# Not from the cache: what the tests see of the kernel is not an input that Go knows of.
# Not vetted: make lint does that.
GO_TEST := CGO_ENABLED=1 go test -race -vet=off -count=1 -timeout 20m
GO_TEST_WITHOUT_RACE := CGO_ENABLED=0 go test -vet=off -count=1 -timeout 20m

# Packages that link Kubernetes' client. It takes minutes to compile, and once more for the race detector: make test-hard
# has that.
API_CLIENTS := /api/ /cmd/hostpath-provisioner$$ /cmd/hostpath-provisioner-operator$$ /cmd/local-pv-provisioner$$ \
	/pkg/localpv /pkg/migrate /pkg/operator /pkg/provisioner /test/cmd/bundle$$
# Suites that ask the driver for one thing after another. Those with callers at once, and the packages of the driver, have the race
# detector in make test, all others in make test-hard.
ONE_AFTER_ANOTHER := /e2e/blocks$$ /e2e/health$$ /e2e/inspect$$ /e2e/runbooks$$
WITHOUT_RACE := $(API_CLIENTS) $(ONE_AFTER_ANOTHER) /e2e/crash$$ /e2e/mounter /e2e/moves /e2e/privilege$$ /e2e/snapshots$$ /e2e/volumes$$

# The nested modules hold what must stay out of the product's go.mod.
MODULES := $(shell find . -name go.mod -printf '%P\n' | xargs -n1 dirname | sort)
NESTED := $(filter-out . test/tools test/cluster/kubernetes test/cluster/oldest,$(MODULES))

.PHONY: help
help: ## Print this
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-19s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: build
build: ## Build the programs for this machine into bin/
	@mkdir -p bin
	$(GO_BUILD) -o bin/ ./cmd/...

.PHONY: cross
cross: $(ARCHES:%=cross-%) ## Build the programs for linux/amd64 and linux/arm64 into bin/linux_*/

.PHONY: $(ARCHES:%=cross-%)
$(ARCHES:%=cross-%): cross-%:
	@mkdir -p bin/linux_$*
	GOOS=linux GOARCH=$* $(GO_BUILD) -o bin/linux_$*/ ./cmd/...

# What the driver's demo and bench start. The other programs link Kubernetes' client, which takes minutes to compile.
.PHONY: driver
driver:
	@mkdir -p bin
	$(GO_BUILD) -o bin/ ./cmd/hostpath-csi-driver

.PHONY: demo
demo: driver ## See the driver at work on a pool of its own, in under a minute; nothing stays behind
	@test/tools/install-deps demo
	@# Not go run: a SIGTERM would end that alone, and leave the demo without a parent and not cleaned up.
	@go build -o bin/demo ./test/cmd/demo
	@HOSTPATH_CSI_DRIVER=bin/hostpath-csi-driver exec bin/demo

# Such as BENCH_FLAGS='--filesystem xfs --only mounts'; bin/bench --help has them all.
BENCH_FLAGS ?=

.PHONY: bench
bench: driver ## Measure the driver against what it is built on, as ratios with budgets, in some ten minutes
	@test/tools/install-deps bench
	@go build -o bin/bench ./test/cmd/bench
	@HOSTPATH_CSI_DRIVER=bin/hostpath-csi-driver exec bin/bench $(BENCH_FLAGS)

# Small, unless BENCH_FLAGS='--move-mib 10240 --mover-files 1000000'.
.PHONY: bench-move
bench-move: driver ## Measure moves against copies over the same connection, and what movers take, in a few minutes
	@test/tools/install-deps bench-move
	@go build -o bin/bench ./test/cmd/bench
	@HOSTPATH_CSI_DRIVER=bin/hostpath-csi-driver exec bin/bench --only moves --rounds 3 $(BENCH_FLAGS)

.PHONY: docs
docs: ## Write what of docs/ is made from the code: docs/metrics.md
	@mkdir -p bin
	go run ./test/cmd/metricsdoc > bin/metrics.md
	@mv bin/metrics.md docs/metrics.md

# The path that the site is served below.
export SITE_BASE ?= /

# npm writes this file when all else is there.
site/node_modules/.package-lock.json: site/package-lock.json
	@test/tools/install-deps site
	cd site && npm ci

.PHONY: site
site: site/node_modules/.package-lock.json ## Build the site of the documents into bin/site/
	site/node_modules/.bin/vitepress build site

.PHONY: check-site
check-site: site ## Open each page of the site in Chromium, wide and narrow, light and dark, and follow its links
	@test/tools/install-deps check-site
	node site/check.js

# The deep copies of api/, and the definition of its kinds for clusters, from the types there.
API := v1alpha1 v1beta1
# $(1) is controller-gen, and $(2) an empty word or a directory and a slash that the files go below.
write_generated = for version in $(API); do $(1) object paths=./api/$$version output:object:dir=$(2)api/$$version || exit; done; \
	$(1) crd:maxDescLen=300 paths=./api/... output:crd:dir=$(2)deploy/operator
GENERATED := $(API:%=api/%/zz_generated.deepcopy.go) \
	deploy/operator/hostpathprovisioner.kubevirt.io_hostpathprovisioners.yaml deploy/operator/hostpathprovisioner.kubevirt.io_volumemoves.yaml

.PHONY: generate
generate: bin/tools/controller-gen ## Write what is generated of api/: deep copies and the CustomResourceDefinition
	$(call write_generated,$<,)

# What the host's kernel does is no part of it: Go's cache of results holds. make lint has vet.
# Short programs, which linkers and tests are, need not collect garbage as often as services.
.PHONY: unit
unit: ## Run what needs neither root nor the network nor the race detector: seconds when repeated
	@env -u CI HOSTPATH_UNIT=1 GOGC=400 go test -ldflags='-s -w' -p $$((2 * $$(nproc))) -vet=off -short $$(go list -f '{{if or .TestGoFiles .XTestGoFiles}}{{.ImportPath}}{{end}}' ./... | grep -v -e /test/e2e/ -e /sanity$$)

.PHONY: test
test: ## Run every test but those of a cluster, the product's with the race detector, and print the coverage
	@test/tools/install-deps test
	@# What needs no race detector waits for disks most of the time: one package after another, beside all else.
	@source test/tools/beside; trap stop_beside EXIT; \
		beside rest 3 $(MAKE) test-rest; \
		$(MAKE) test-race test-beside-kernel; \
		ended rest

.PHONY: test-beside-kernel
test-beside-kernel:
	@# The virtual machine computes, then the modules have their turn. ALSO names targets that mostly wait, and share their time.
	@source test/tools/beside; trap stop_beside EXIT; \
		beside kernel 2 $(MAKE) test-kernel test-modules KERNEL_TIMEOUT=45m KERNEL_TEST_TIMEOUT=40m; \
		[[ -z '$(ALSO)' ]] || $(MAKE) $(ALSO); \
		ended kernel

# Wants to see all processes of the machine, which it does not beside others.
SEES_PROCESSES := ./pkg/localpv

.PHONY: test-race
test-race:
	@test/tools/install-deps test
	@mkdir -p bin
	@# Once, and not by each package that runs it.
	CGO_ENABLED=1 go build -race -o bin/race/ ./cmd/hostpath-csi-driver
	HOSTPATH_CSI_DRIVER=$(CURDIR)/bin/race/hostpath-csi-driver $(GO_TEST) -short -coverprofile=bin/cover.out $$(go list ./... | grep -v -e /sanity $(WITHOUT_RACE:%=-e '%'))
	@test/tools/coverage bin/cover.out
	$(GO_TEST_WITHOUT_RACE) -short $(SEES_PROCESSES)

.PHONY: test-rest
test-rest:
	CGO_ENABLED=0 go build -o bin/static/ ./cmd/hostpath-csi-driver
	HOSTPATH_CSI_DRIVER=$(CURDIR)/bin/static/hostpath-csi-driver $(GO_TEST_WITHOUT_RACE) -p 1 -short $$(go list ./... | grep $(WITHOUT_RACE:%=-e '%') | grep -v $(SEES_PROCESSES:./%=-e '/%$$'))

.PHONY: test-modules
test-modules: sanity
	@# Without the race detector, for which Kubernetes' client would have to be compiled anew.
	@for module in $(NESTED); do (echo "go test in $$module"; cd $$module && \
		$(GO_TEST_WITHOUT_RACE) $$(go list ./... | grep -v -e /cases -e /lifecycle -e /cluster/release -e /publishing)); done

# Without the race detector, which would take most of the time; make test has it, in a short form.
.PHONY: test-load
test-load: ## Have 64 callers at work on 10,000 volumes for five minutes, in eight
	@test/tools/install-deps test
	$(GO_TEST_WITHOUT_RACE) -v -timeout 1h ./test/e2e/load

# What attacks the driver, for as long as it takes: all that make test has a short form of. What depends on
# quotas is done again in the virtual machine, on XFS and ext4 that have them, the load for a minute.
.PHONY: test-hard
test-hard: FUZZTIME = 5m
test-hard: test-crash test-volumes test-faults test-model test-hostile test-load test-privilege check-site ## Attack the driver in full, which takes hours: what make test does in a short form
	$(GO_TEST) $$(go list ./... | grep $(API_CLIENTS:%=-e '%') $(ONE_AFTER_ANOTHER:%=-e '%'))
	@$(MAKE) test-kernel KERNEL_TESTS='./pkg/hostfs/bind ./test/e2e/crash ./test/e2e/volumes ./test/e2e/faults ./test/e2e/load ./pkg/hostfs/quota ./cmd/hostpath-provisioner' KERNEL_FLAGS= KERNEL_TIMEOUT=190m KERNEL_TEST_TIMEOUT=170m
	@$(MAKE) test-kernel KERNEL_TESTS=./test/e2e/moves KERNEL_FLAGS='-test.run TestMove|TestGrowth'
	@$(MAKE) test-cluster CASES=Killed KILL_EVERY=1 CASES_TIMEOUT=2h
	@$(MAKE) test-cluster CASES='HundredVolumes|DrainOfTwentyPods|Move|BackToUpstream' CASES_FLAGS=
	@$(MAKE) test-cluster CASES=OperatorWithPoolOnClaims QUIET=1h CASES_TIMEOUT=2h
	@$(MAKE) test-cluster CASES=ProvisionerOnSingleNode NODES=node-a
	@$(MAKE) test-cluster-oldest
	@$(MAKE) test-cluster-lifecycle image
	@# When all else has ended: a busy machine makes ratios worse. They fail beyond a budget.
	@$(MAKE) bench bench-move
	@$(MAKE) bench BENCH_FLAGS='--filesystem xfs --only mounts'
	@$(MAKE) bench BENCH_FLAGS='--filesystem btrfs --only mounts'

.PHONY: test-crash
test-crash: ## Kill the driver at every step of each call and of its start, movers, the pool mounter and the cleaning of devices, and take the power away, in full
	@test/tools/install-deps test
	$(GO_TEST) -timeout 3h ./test/e2e/crash ./test/e2e/moves/... ./test/e2e/mounter ./pkg/devices

.PHONY: test-volumes
test-volumes: ## Try what is promised of sizes, with ten thousand volumes
	@test/tools/install-deps test
	$(GO_TEST) -timeout 1h ./test/e2e/volumes

.PHONY: test-model
test-model: ## Walk over all calls at random, with restarts and crashes, against a model, 1,500 times
	@test/tools/install-deps test
	$(GO_TEST) -timeout 1h ./test/e2e/model -rapid.checks=1500

.PHONY: test-hostile
test-hostile: ## Swap paths while calls work on them, tear what is on disk, kill who freezes pods, copy a million files, and fuzz
	@test/tools/install-deps test
	$(GO_TEST) -timeout 1h ./pkg/pool ./pkg/hostfs/clone ./pkg/hostfs/freezer ./pkg/hostfs/transfer ./test/e2e/snapshots
	@$(MAKE) fuzz FUZZTIME='$(FUZZTIME)'

.PHONY: test-privilege
test-privilege: ## Run the driver with what it needs and no more, and without each piece of that
	@test/tools/install-deps test
	$(GO_TEST) ./test/e2e/privilege

.PHONY: test-faults
test-faults: ## Attack the driver with pools that are full, read-only, unmounted, failing and hanging, in full
	@test/tools/install-deps test
	$(GO_TEST) -timeout 1h ./test/e2e/faults

.PHONY: sanity
sanity: ## Run csi-sanity against the real binary with real mounts
	@test/tools/install-deps test
	$(GO_TEST) -v ./sanity

# What the host's kernel may lack is tested in a virtual machine, one after another in one boot.
KERNEL_TESTS := ./pkg/hostfs/quota ./pkg/hostfs/label ./cmd/hostpath-provisioner ./sanity ./test/e2e/volumes ./test/e2e/blocks ./test/e2e/crash ./test/e2e/faults ./test/e2e/privilege ./test/e2e/mounter/mapper ./test/e2e/devices

# An emulated processor needs many minutes for ten thousand volumes: make test-kernel KERNEL_FLAGS= has them
# there too. On the host, where btrfs keeps the limits, make test has them always. pkg/pool is not among KERNEL_TESTS:
# it uses no filesystem of the guest, and takes an emulated processor minutes.
KERNEL_FLAGS ?= -test.short
# Limits change nothing of these, and make test has them on the host. make test-kernel KERNEL_FLAGS= has all.
KERNEL_SHORT_crash := -test.skip OnFullDisk|LeavesNoCopy|Upstream|SnapshotCrash
KERNEL_SHORT_faults := -test.skip Hanging|Failing|Unreadable|NFS|LongLine|Clock|Unmounted|StartOnFullDisk
# The second is the shorter one, so that a test which hangs reports where.
KERNEL_TIMEOUT ?= 30m
KERNEL_TEST_TIMEOUT ?= 25m

.PHONY: test-kernel
test-kernel: ## Run what needs quotas on XFS and ext4, and SELinux, in a virtual machine with Debian's kernel
	@test/tools/install-deps test
	@mkdir -p bin/kernel
	@# Built first, not go run: it has to be the one that gets the signals and whose status make sees.
	go build -o bin/kernel/kernel ./test/cmd/kernel
	go build -o bin/kernel/ ./cmd/hostpath-csi-driver ./cmd/pool-mounter
	go test -c -o bin/kernel/ $(KERNEL_TESTS)
	bin/kernel/kernel --env CI --timeout $(KERNEL_TIMEOUT) --memory 3072 \
		--add bin/kernel/hostpath-csi-driver:/usr/bin/hostpath-csi-driver --env HOSTPATH_CSI_DRIVER=/usr/bin/hostpath-csi-driver \
		--add bin/kernel/pool-mounter:/usr/bin/pool-mounter --env POOL_MOUNTER=/usr/bin/pool-mounter \
		$(foreach package,$(KERNEL_TESTS),--run 'bin/kernel/$(notdir $(package)).test -test.timeout $(KERNEL_TEST_TIMEOUT) $(KERNEL_FLAGS) $(if $(KERNEL_FLAGS),$(KERNEL_SHORT_$(notdir $(package))))')

# What a machine lacks for a cluster is said before anything is built.
.PHONY: cluster-check
cluster-check:
	@cd test/cluster && go run ./cmd/check

# The programs of Kubernetes take 20 to 25 minutes of processor time to build, once. The module that names
# them has no code. The harness has the same flags, and so the same client.
KUBERNETES := bin/cluster/kube-apiserver
kubernetes_flags = -ldflags '-s -w -X k8s.io/component-base/version.gitVersion=$(shell sed -n 's|.*k8s.io/kubernetes \(v[^ ]*\).*|\1|p' test/cluster/$(1)/go.mod)'
KUBERNETES_FLAGS := $(call kubernetes_flags,kubernetes)
# The manifests of the snapshot-controller and of its kinds, which that has in two modules.
SNAPSHOTTER := bin/cluster/external-snapshotter
$(KUBERNETES): test/cluster/kubernetes/go.mod test/cluster/kubernetes/go.sum | cluster-check
	@mkdir -p bin/cluster
	@# A kubelet without a version is not let into a cluster. Packages are counted, so that a person sees
	@# that it goes on.
	cd test/cluster/kubernetes && go build -v -o $(CURDIR)/bin/cluster/ \
		$(KUBERNETES_FLAGS) $$(go list tool | grep -v -e /agnhost -e /ginkgo) 2>&1 | \
		awk '!/^[^ :]+$$/ { print; next } ++n % 100 == 0 { print n, "packages"; fflush() }'
	@rm -rf $(SNAPSHOTTER) && mkdir $(SNAPSHOTTER)
	@cd test/cluster/kubernetes && dir() { go list -m -f '{{.Dir}}' github.com/kubernetes-csi/external-snapshotter/$$1; } && \
		cp -r --no-preserve=mode "$$(dir v8)/deploy/kubernetes/snapshot-controller" $(CURDIR)/$(SNAPSHOTTER)/controller && \
		cp -r --no-preserve=mode "$$(dir client/v8)/config/crd" $(CURDIR)/$(SNAPSHOTTER)/crd
	@touch $@

# The same of the oldest Kubernetes that can be built: of v1.29 a module is missing.
OLDEST := bin/oldest/kube-apiserver
$(OLDEST): test/cluster/oldest/go.mod test/cluster/oldest/go.sum | cluster-check
	@mkdir -p bin/oldest
	cd test/cluster/oldest && go build -o $(CURDIR)/bin/oldest/ $(call kubernetes_flags,oldest) $$(go list tool)
	@touch $@

# What of all that takes long, once.
.PHONY: cluster-build
cluster-build: $(KUBERNETES) cross-$(shell go env GOARCH)

# What the nodes run besides: the image from the Dockerfile, and stand-ins for sidecars that are no Go modules.
.PHONY: cluster-programs
cluster-programs: cluster-check $(KUBERNETES) cross-$(shell go env GOARCH) $(IMAGES:%=bin/image/%/$(shell go env GOARCH))
	@test/tools/install-deps cluster
	cd test/cluster && go build -ldflags '-s -w' -o $(CURDIR)/bin/cluster/ ./standin/... ./cmd/...
	@install -C bin/linux_$$(go env GOARCH)/kubectl-hostpath bin/cluster/
	@for program in $(IMAGES); do \
		test/tools/image $$program localhost/$$program:test '$(VERSION)' bin/cluster/$$program.tar "$$(go env GOARCH)"; \
		go run ./test/cmd/image check $$program bin/cluster/$$program.tar; done

# The kinds of the Prometheus operator. Go's checksum database vouches for the version.
MONITORING := github.com/prometheus-operator/prometheus-operator@v0.85.0
MONITORING_KINDS := bin/cluster/prometheus-operator.yaml
$(MONITORING_KINDS): Makefile
	@mkdir -p bin/cluster
	@dir=$$(go mod download -json $(MONITORING) | sed -n 's/^\t"Dir": "\(.*\)",$$/\1/p') && install -m 644 "$$dir/bundle.yaml" $@

# Before each so many of their steps programs are killed.
KILL_EVERY ?= 24

# How long the operator is to write nothing. Each thing that it does again and again takes 5 s there.
QUIET ?= 15s

# The nodes of the cluster. Many cases want two.
NODES ?= node-a,node-b
CASES_TIMEOUT ?= 45m

# Without it the cases that have very many pods, or return to the upstream operator, are run too: make test-hard has those.
CASES_FLAGS ?= -test.short

# Where the programs of the cluster are.
PROGRAMS ?= bin/cluster

# For example CASES='Expand|ReadOnly'. A Ctrl-C has to reach the tests themselves: not go test.
CASES ?= .
.PHONY: test-cluster
test-cluster: cluster-programs $(MONITORING_KINDS) ## Install the driver on a real Kubernetes cluster, and do there what users do
	cd test/cluster && go test -c -o $(CURDIR)/bin/cluster/cases.test ./cases
	@cd test/cluster/cases && exec $(CURDIR)/bin/cluster/cases.test -test.v -test.parallel 8 -test.timeout $(CASES_TIMEOUT) -programs $(CURDIR)/$(PROGRAMS) -nodes $(NODES) -kill-every $(KILL_EVERY) -quiet $(QUIET) $(CASES_FLAGS) -test.run '$(CASES)'

# Kubernetes 1.30 shows no health (1.37), takes no smaller size for a claim that could not grow (1.32), and writes no status of an object
# that breaks a rule (1.33). What is not of Kubernetes is the same.
OLDEST_SKIP := HealthOfVolumesInKubernetes|ExpandBeyondPoolCapacity|UpstreamObjectThatBreaksRules
.PHONY: test-cluster-oldest
test-cluster-oldest: cluster-programs $(OLDEST) ## Do the same on the oldest Kubernetes that can be built
	@for file in bin/cluster/*; do [[ -f bin/oldest/$${file##*/} ]] || ln -sfn ../cluster/$${file##*/} bin/oldest/; done
	@$(MAKE) test-cluster PROGRAMS=bin/oldest CASES_FLAGS="$(CASES_FLAGS) -health-on= -test.skip '$(OLDEST_SKIP)'"

.PHONY: test-cluster-lifecycle
test-cluster-lifecycle: cluster-programs ## Start clusters as a person does, and end them in the ways that a person can
	cd test/cluster && go test -c -o $(CURDIR)/bin/cluster/cases.test ./cases
	cd test/cluster && go test -c -o $(CURDIR)/bin/cluster/lifecycle.test ./lifecycle
	@cd test/cluster/lifecycle && exec $(CURDIR)/bin/cluster/lifecycle.test -test.v -test.timeout 15m -programs $(CURDIR)/bin/cluster

# Not only what the host's kernel can: there df in a pod shows the size of its volume.
KERNEL_CASES ?= ^TestExpandInUse$$
.PHONY: test-cluster-kernel
test-cluster-kernel: cluster-programs ## Let a volume grow in a cluster whose pool is XFS, in a virtual machine, in ten minutes
	@test/tools/install-deps test
	@mkdir -p bin/kernel
	go build -o bin/kernel/kernel ./test/cmd/kernel
	cd test/cluster && go test -c -o $(CURDIR)/bin/cluster/cases.test ./cases
	@exec test/tools/cluster-in-kernel '$(KERNEL_CASES)'

# The tests of Kubernetes for storage drivers, and the image that they run pods of.
SUITE := bin/cluster/storage.test
$(SUITE): test/cluster/kubernetes/go.mod test/cluster/kubernetes/go.sum test/cluster/kubernetes/storage/storage_test.go | cluster-check
	@mkdir -p bin/cluster
	cd test/cluster/kubernetes && go build -o $(CURDIR)/bin/cluster/ $(KUBERNETES_FLAGS) $$(go list tool | grep -e /agnhost -e /ginkgo)
	cd test/cluster/kubernetes && go test -c -o $(CURDIR)/$@ $(KUBERNETES_FLAGS) ./storage
	@touch $@

# Left out: see docs/cluster.md.
SUITE_FOCUS ?= External.Storage
SUITE_SKIP ?= \[(Disruptive|Feature:([^V]|Volume[^S]|VolumeSource)[^]]*)\]|any volume data source|Pre-provisioned Snapshot
.PHONY: test-k8s-storage
test-k8s-storage: $(SUITE) cluster-programs ## Run the tests of Kubernetes for storage drivers
	@# Most of them wait most of the time. Ginkgo compares its version with that of the module that the program
	@# lies in, which is not the one that the program was made from.
	@GOFLAGS='$(GOFLAGS) -modfile=$(CURDIR)/test/cluster/kubernetes/go.mod' exec bin/cluster/cluster --restores=test/cluster/overlay/restores run bin/cluster/ginkgo --procs=6 --no-color --timeout=60m --focus='$(SUITE_FOCUS)' --skip='$(SUITE_SKIP)' \
		$(SUITE) -- -provider=skeleton -storage.testdriver=$(CURDIR)/test/cluster/testdriver.yaml

.PHONY: cluster-up
cluster-up: cluster-programs ## Start a Kubernetes cluster with the driver, to play with
	@exec bin/cluster/cluster up

.PHONY: cluster-down
cluster-down: ## End that cluster; nothing of it stays
	@[[ ! -x bin/cluster/cluster ]] || exec bin/cluster/cluster down

# .ci/run builds beside the tests, with a lock. This waits for it.
.PHONY: built
built:
	@flock bin/build.lock true

# How long each fuzz target runs. As part of test-hard that is 5m, unless given on the command line.
FUZZTIME ?= 20s

.PHONY: fuzz
fuzz: ## Fuzz all that parses what others wrote, FUZZTIME (20s) for each target, beginning with the kept corpora
	@for package in $$(grep -rl '^func Fuzz' --include='*_test.go' cmd pkg | xargs -n1 dirname | sort -u); do \
		for target in $$(go test -list '^Fuzz' "./$$package" | grep '^Fuzz'); do \
			echo "$$package: $$target"; \
			go test -run '^$$' -fuzz "^$$target$$" -fuzztime '$(FUZZTIME)' "./$$package"; \
		done; \
	done

.PHONY: lint
lint: bin/tools/golangci-lint bin/tools/controller-gen bin/tools/actionlint ## Check the format, the go.mod files, the workflows, and the code with golangci-lint
	@unformatted=$$(gofmt -s -l .); [[ -z $$unformatted ]] || { printf 'run gofmt -s -w on:\n%s\n' "$$unformatted"; exit 1; }
	@bin/tools/actionlint
	@mkdir -p bin/.generated
	@$(call write_generated,bin/tools/controller-gen,bin/.generated/)
	@# What of the product depends on the architecture compiles for each.
	@for arch in $(ARCHES); do GOARCH=$$arch go build -o /dev/null ./pkg/hostfs/... ./cmd/hostpath-csi-driver; done
	@for file in $(GENERATED); do cmp $$file bin/.generated/$$file || { echo 'run make generate'; exit 1; }; done
	@for module in $(MODULES); do (echo "go mod tidy -diff in $$module"; cd $$module && go mod tidy -diff); done
	@for module in . $(NESTED); do (echo "golangci-lint in $$module"; cd $$module && $(CURDIR)/$< run --config $(CURDIR)/.golangci.yml ./...); done

.PHONY: ci
ci: ## Run all that must hold before a change lands, as root, in about an hour
	.ci/run

.PHONY: lines
lines: ## Count the lines of Go of the product and of its tests, and the words of the documents
	@# The stand-ins of kernel facilities are packages whose names end in test.
	@product=$$(git ls-files 'cmd/*.go' 'pkg/*.go' 'api/*.go' | grep -v -e '_test.go$$' -e 'test/[^/]*$$'); \
		printf '%7d lines of the product\n' "$$(cat $$product | wc -l)"; \
		printf '%7d lines of tests, stand-ins and rigs\n' "$$(git ls-files '*.go' | grep -vxF "$$product" | xargs cat | wc -l)"
	@printf '%7d words of documents\n' "$$(git ls-files '*.md' | xargs cat | wc -w)"

.PHONY: vuln
vuln: bin/tools/govulncheck ## Find known vulnerabilities in what the programs call
	test/tools/vuln $< ./...

.PHONY: image
image: cross $(foreach program,$(IMAGES),$(ARCHES:%=bin/image/$(program)/%)) ## Build the image of each program for each architecture into bin/image/*.tar, and check what they hold
	@for program in $(IMAGES); do \
		test/tools/image $$program '$(IMAGE_PREFIX)'$$program:'$(VERSION)' '$(VERSION)' bin/image/$$program.tar $(ARCHES); \
		go run ./test/cmd/image check $$program bin/image/$$program.tar; done

# What people have kubectl on, and not only nodes.
PLUGINS := $(foreach os,darwin linux windows,$(ARCHES:%=$(os)_%))

.PHONY: plugins
plugins: $(PLUGINS:%=plugin-%) ## Build kubectl-hostpath for each system that people have kubectl on, into bin/plugin/

.PHONY: $(PLUGINS:%=plugin-%)
$(PLUGINS:%=plugin-%): plugin-%:
	@mkdir -p bin/plugin/$*
	GOOS=$(word 1,$(subst _, ,$*)) GOARCH=$(word 2,$(subst _, ,$*)) $(GO_BUILD) -o bin/plugin/$*/ ./cmd/kubectl-hostpath

# The ClusterServiceVersion that the catalogue has before this one, if any, such as hostpath-provisioner-operator.v0.1.0.
REPLACES ?=

.PHONY: bundle
bundle: ## Write the bundle of the operator's VERSION for the Operator Lifecycle Manager into bin/bundle/
	go run ./test/cmd/bundle --version '$(VERSION)' --image-prefix '$(IMAGE_PREFIX)' --repository '$(REPOSITORY)' --replaces '$(REPLACES)' bin/bundle

# Programs of others that only a release needs. Go's checksum database vouches for their versions.
SYFT := github.com/anchore/syft/cmd/syft@v1.57.1
COSIGN := github.com/sigstore/cosign/v3/cmd/cosign@v3.1.3
HELM := helm.sh/helm/v4/cmd/helm@v4.2.4
REGISTRY := github.com/distribution/distribution/v3/cmd/registry@v3.0.0
KREW := sigs.k8s.io/krew/cmd/krew@v0.4.3

bin/release-tools/syft: PACKAGE = $(SYFT)
bin/release-tools/cosign: PACKAGE = $(COSIGN)
bin/release-tools/helm: PACKAGE = $(HELM)
bin/release-tools/registry: PACKAGE = $(REGISTRY)
bin/release-tools/krew: PACKAGE = $(KREW)
bin/release-tools/syft bin/release-tools/cosign bin/release-tools/helm bin/release-tools/registry bin/release-tools/krew: Makefile
	GOBIN=$(CURDIR)/bin/release-tools go install -ldflags '-s -w' $(PACKAGE)

.PHONY: sboms
sboms: bin/release-tools/syft ## Write what each image holds into bin/sbom/, as CycloneDX
	@mkdir -p bin/sbom
	@for program in $(IMAGES); do for arch in $(ARCHES); do \
		SYFT_CHECK_FOR_APP_UPDATE=false $< scan --quiet --platform linux/$$arch --source-name $$program --source-version '$(VERSION)' \
			--output cyclonedx-json=bin/sbom/$$program-linux-$$arch.json oci-archive:bin/image/$$program.tar; done; done

.PHONY: sign
sign: bin/release-tools/cosign ## Sign the checksums of the release VERSION: with KEY, a private key of cosign, or as the workflow that runs it
	KEY='$(KEY)' release/sign bin/release/$(VERSION)

PINNED := deploy/csi/base/kustomization.yaml deploy/csi/snapshots/kustomization.yaml

.PHONY: pin-sidecars
pin-sidecars: ## Write the digests that registry.k8s.io has for the sidecars' tags into deploy/
	@test/tools/install-deps pin
	release/pin $(PINNED)

.PHONY: check-pins
check-pins: ## Check that the sidecars in deploy/ have digests, as those of a release must
	release/pin --check $(PINNED)

.PHONY: publish
publish: bin/release-tools/cosign bin/release-tools/helm ## Push and sign the images and charts of the release VERSION, and offer its files on GitHub
	@test/tools/install-deps publish
	release/publish bin/release/$(VERSION) '$(VERSION)' '$(IMAGE_PREFIX)' $(IMAGES)

.PHONY: release
release: RELEASE = cd release && go run . --version '$(VERSION)' --image-prefix '$(IMAGE_PREFIX)' \
	--repository '$(REPOSITORY)' --arches '$(shell echo $(ARCHES) | tr ' ' ,)' --time "$$(git log -1 --format=%ct)" --out ../bin/release/$(VERSION)
release: ## Make the release VERSION, such as v0.1.0, in bin/release/: manifests, programs, images, notes, bundle, SBOMs and checksums
	@[[ -z $$(git status --porcelain) ]] || { echo 'commit the changes first: a release is made of a commit'; exit 1; }
	@$(RELEASE) --check
	@$(MAKE) plugins
	@$(MAKE) image bundle sboms
	@$(RELEASE)

.PHONY: test-release
test-release: cluster-programs bin/release-tools/helm ## Try the release VERSION as a new user does: from its files alone, on a clean cluster
	cd test/cluster && go test -c -o $(CURDIR)/bin/cluster/release.test ./release
	@# The second time kubelet has the directory of k0s, which is a symbolic link there.
	@for kubelet in '' /var/lib/k0s/kubelet; do (cd test/cluster/release && exec $(CURDIR)/bin/cluster/release.test -test.v -test.timeout 40m -programs $(CURDIR)/bin/cluster -release $(CURDIR)/bin/release/$(VERSION) -helm $(CURDIR)/bin/release-tools/helm -kubelet "$$kubelet"); done

# Elsewhere and later, and compiled anew: what is cached would hide that a program has a path or the time of day. What images take from Debian is
# the same as long as its archive is.
.PHONY: test-reproducible
test-reproducible: ## Make the release VERSION once more, of a clone, and compare it byte by byte
	@dir=$$(mktemp -d) && trap 'chmod -R u+w "$$dir" && rm -rf "$$dir"' EXIT && git clone --quiet . "$$dir/clone" && \
		GOCACHE="$$dir/cache" $(MAKE) -C "$$dir/clone" release VERSION='$(VERSION)' && \
		diff -r --exclude='*.sigstore.json' bin/release/$(VERSION) "$$dir/clone/bin/release/$(VERSION)"

.PHONY: test-publish
test-publish: bin/release-tools/cosign bin/release-tools/helm bin/release-tools/registry bin/release-tools/krew ## Publish the release VERSION to a registry on this machine, compare what that has, and install the plugin by krew
	@test/tools/install-deps publish
	cd release && $(GO_TEST_WITHOUT_RACE) ./publishing -release $(CURDIR)/bin/release/$(VERSION) -tools $(CURDIR)/bin/release-tools

# What an image takes from Debian; make clean has it fetched again, with Debian's newest fixes.
bin/image/%: test/cmd/image/main.go test/cmd/image/root.go
	@test/tools/install-deps image
	go run ./test/cmd/image root $(subst /, ,$*) $@

.PHONY: clean
clean: ## Remove bin/, and what the site is built with
	rm -rf bin site/node_modules

bin/tools/golangci-lint bin/tools/govulncheck bin/tools/controller-gen bin/tools/actionlint &: test/tools/go.mod test/tools/go.sum
	@mkdir -p bin/tools
	cd test/tools && go build -o $(CURDIR)/bin/tools/ tool
