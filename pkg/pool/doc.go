// Package pool keeps volumes in storage pools: directories in which each volume is
// a directory, next to a record of what was promised. It decides what exists, what
// fits and what may be removed, and keeps that true through crashes; the layout is
// in docs/layout.md. It knows nothing of gRPC or Kubernetes, and reaches Linux
// through the packages below pkg/hostfs.
//
// The disk is the truth. What is held in memory, the index and the ledger, serves
// the answers that may not cost a scan, and is compared with the disk as time goes by.
package pool
