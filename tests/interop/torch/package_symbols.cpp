// SPDX-License-Identifier: Apache-2.0
// Functions of a package that torch looks up when it loads one, and that no test calls. They take
// arguments, which nobody needs: so this file doesn't include their declarations.
extern "C" {
int AOTInductorModelContainerGetConstantName() { return 1; }
int AOTInductorModelContainerGetConstantOriginalFQN() { return 1; }
int AOTInductorModelContainerGetConstantDtype() { return 1; }
int AOTInductorModelContainerExtractConstantsMap() { return 1; }
int AOTInductorModelContainerUpdateConstantBuffer() { return 1; }
int AOTInductorModelContainerUpdateInactiveConstantBuffer() { return 1; }
int AOTInductorModelContainerRunConstantFolding() { return 1; }
int AOTInductorModelContainerSwapConstantBuffer() { return 1; }
int AOTInductorModelContainerFreeInactiveConstantBuffer() { return 1; }
int AOTInductorModelContainerUpdateUserManagedConstantBuffer() { return 1; }
int AOTInductorModelContainerGetConstantsBlobSize() { return 1; }
int AOTInductorModelUpdateConstantsFromBlob() { return 1; }
}
