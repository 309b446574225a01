package testenv

import (
	"os"
	"path/filepath"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"kubevirt.io/hostpath-provisioner/test/must"
)

// Encrypt gives an empty directory of a filesystem that can encrypt a key, and returns what takes it away.
func Encrypt(t testing.TB, path string) (takeKey func()) {
	t.Helper()
	do := func(path string, request uintptr, argument unsafe.Pointer) {
		t.Helper()
		in, err := os.Open(path)
		must.Succeed(t, err)
		_, _, errno := unix.Syscall(unix.SYS_IOCTL, in.Fd(), request, uintptr(argument))
		if must.Succeed(t, in.Close()); errno != 0 {
			t.Fatalf("ioctl %#x of %s: %v", request, path, errno)
		}
	}
	key := struct { // struct fscrypt_add_key_arg of linux/fscrypt.h
		unix.FscryptAddKeyArg
		raw [64]byte
	}{}
	key.Key_spec.Type, key.Raw_size = unix.FSCRYPT_KEY_SPEC_TYPE_IDENTIFIER, uint32(len(key.raw))
	copy(key.raw[:], "of a pod")
	do(path, unix.FS_IOC_ADD_ENCRYPTION_KEY, unsafe.Pointer(&key))
	policy := unix.FscryptPolicyV2{
		Version: unix.FSCRYPT_POLICY_V2, Flags: unix.FSCRYPT_POLICY_FLAGS_PAD_32,
		Contents_encryption_mode: unix.FSCRYPT_MODE_AES_256_XTS, Filenames_encryption_mode: unix.FSCRYPT_MODE_AES_256_CTS,
	}
	copy(policy.Master_key_identifier[:], key.Key_spec.U[:])
	do(path, unix.FS_IOC_SET_ENCRYPTION_POLICY, unsafe.Pointer(&policy))
	return func() {
		t.Helper()
		unix.Sync() // what is not written keeps the key
		remove := unix.FscryptRemoveKeyArg{Key_spec: key.Key_spec}
		do(filepath.Dir(path), unix.FS_IOC_REMOVE_ENCRYPTION_KEY, unsafe.Pointer(&remove))
		if remove.Removal_status_flags != 0 {
			t.Fatalf("the key is still in use: %#x", remove.Removal_status_flags)
		}
	}
}
