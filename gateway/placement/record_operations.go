package placement

import (
	"context"
	"slices"
	"time"

	"github.com/berth-dev/berth/shared/proxylink"
	"github.com/berth-dev/berth/shared/session"
)

// OpenOperation begins a pause, resume or move; errors are session.Open's, and
// for a resume concurrency_limit. key, 32 bytes, seals the session's snapshots if
// it has none yet.
func (r *Record) OpenOperation(ctx context.Context, id string, op session.Operation, key []byte) (session.Session, error) {
	res, err := r.apply(ctx, openOperation, openOperationData{id, op, key})
	return value(res.Session), err
}

// CommitOperation proposes that an operation is done; snap is what a pause or
// move captured. committed is the verdict: false when an abort came first.
// session_not_running: the session has ended; session.ErrStale: the record does
// not remember the operation.
func (r *Record) CommitOperation(ctx context.Context, id, opID string, snap *session.Snapshot) (_ session.Session, committed bool, _ error) {
	res, err := r.apply(ctx, commitOperation, commitOperationData{id, opID, snap})
	return value(res.Session), res.Verdict, err
}

// AbortOperation proposes that an operation never was. committed is the
// verdict: true when a commit came first. Errors as in CommitOperation.
func (r *Record) AbortOperation(ctx context.Context, id, opID string) (_ session.Session, committed bool, _ error) {
	res, err := r.apply(ctx, abortOperation, abortOperationData{id, opID})
	return value(res.Session), res.Verdict, err
}

// MachineEnded takes in a host's word that a session's machine is gone.
// ErrStaleEpoch: that machine is not the session any more; operation_in_progress:
// that will be known when the open operation is decided.
func (r *Record) MachineEnded(ctx context.Context, id string, epoch uint64, at time.Time, reason session.EndReason, errText string) (_ session.Session, already bool, _ error) {
	res, err := r.apply(ctx, machineEnded, endSessionData{id, epoch, at, reason, errText})
	return value(res.Session), res.Already, err
}

// SnapshotDurable notes that a snapshot outlives its host. For one that is not
// the session's any more it changes nothing.
func (r *Record) SnapshotDurable(ctx context.Context, id, snapshotID string) error {
	_, err := r.apply(ctx, snapshotDurable, snapshotDurableData{id, snapshotID})
	return err
}

// usageChunk is how many rows one command carries: some 100 kB.
const usageChunk = 500

// RecordUsage takes in what proxyds carried, each key by its maximum: rows may
// come twice, late or in any order. Rows that are not Countable are an error.
func (r *Record) RecordUsage(ctx context.Context, rows []proxylink.Row) error {
	for chunk := range slices.Chunk(rows, usageChunk) {
		if _, err := r.apply(ctx, recordUsage, recordUsageData{chunk}); err != nil {
			return err
		}
	}
	return nil
}
